"""A stock vLLM server that answers a file of requests while no job needs its GPUs, and gives way by itself.

    python examples/vllm_filler.py requests.jsonl answers.jsonl --node box/gpu0-3 --gpu-gb 70 --ram-gb 40
        --start "systemctl start vllm-eval" --stop "systemctl stop vllm-eval"

The daemon starts the server in its first loan, wakes it for each further one, and puts it to sleep after each. Asked to
yield, this program sends no further request, waits for half of ``--yield-s``, and cuts off what still runs. That is
sent again in the next loan. So is, three times, what the server could not answer (a broken connection, status 429 or
500 and above). Then that status is the answer; where the connection breaks each time, the program ends.

Requests are lines of OpenAI's batch format (``custom_id``, ``url``, ``body``), and so are answers. Started again, the
program leaves out what the server has answered; the last answer to a request counts. Without a daemon it sends all to
the server that listens at ``--url``.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
from collections import Counter, deque
from pathlib import Path
from typing import Any

import httpx

import rollmuxd

Request = dict[str, Any]
#: tries of a request that the server cannot answer, and seconds before it is tried again
TRIES, PAUSE_S = 3, 1.0
#: in place of a status: the connection broke, or there was none
NO_ANSWER = 0


class Batch:
    """The requests that have no answer yet, and the file of answers."""

    def __init__(self, requests: Path, answers: Path, url: str, at_once: int) -> None:
        answered = set()
        if answers.exists():
            for line in map(json.loads, answers.read_text().splitlines()):
                if not _failed(line["response"]):
                    answered.add(line["custom_id"])
        todo = map(json.loads, filter(str.strip, requests.read_text().splitlines()))
        self.todo = deque(request for request in todo if request["custom_id"] not in answered)
        self.again = self.failed = 0
        self._tried: Counter[str] = Counter()
        self._answers, self._at_once = answers, at_once
        self._http = httpx.AsyncClient(base_url=url, timeout=None)

    async def work(self, slot: rollmuxd.Slot, drain_s: float) -> None:
        """Send requests until all are answered, or the slot is to be left."""
        running: dict[asyncio.Task[Any], Request] = {}
        try:
            while (self.todo or running) and not slot.should_yield:
                while self.todo and len(running) < self._at_once:
                    request = self.todo.popleft()
                    running[asyncio.create_task(self._send(request))] = request
                self._keep(running, await asyncio.wait(running, timeout=0.05, return_when=asyncio.FIRST_COMPLETED))
            if running and not slot.lost:
                self._keep(running, await asyncio.wait(running, timeout=drain_s))
        finally:
            self.again += len(running)
            self.todo.extendleft(running.values())
            for task in running:
                task.cancel()  # the server hears that, and stops to generate
            await asyncio.gather(*running, return_exceptions=True)

    async def _send(self, request: Request) -> dict[str, Any]:
        try:
            answer = await self._http.post(request["url"], json=request["body"])
            response = {"status_code": answer.status_code, "body": _body(answer)}
        except httpx.TransportError as error:
            response = {"status_code": NO_ANSWER, "body": {"error": {"message": f"{type(error).__name__}: {error}"}}}
        if _failed(response):
            await asyncio.sleep(PAUSE_S)  # nor would the next request fare better
        return response

    def _keep(self, running: dict[asyncio.Task[Any], Request], ended: tuple[set[asyncio.Task[Any]], Any]) -> None:
        for task in ended[0]:
            response = task.result()
            request = running.pop(task)
            failed = _failed(response)
            self._tried[request["custom_id"]] += failed
            # aborted: the slot was lost, and the server put to sleep
            aborted = any(it.get("finish_reason") == "abort" for it in response["body"].get("choices", ()))
            if aborted or (failed and self._tried[request["custom_id"]] < TRIES):
                self.again += 1
                self.todo.appendleft(request)
                continue
            if response["status_code"] == NO_ANSWER:
                self.todo.appendleft(request)
                raise SystemExit(f"the server did not answer {TRIES} times: {response['body']['error']['message']}")
            self.failed += failed
            with self._answers.open("a") as file:
                file.write(json.dumps({"custom_id": request["custom_id"], "response": response}) + "\n")


def _failed(response: dict[str, Any]) -> bool:
    """Whether the server could not answer, so that it may be asked again."""
    return response["status_code"] in (NO_ANSWER, 429) or response["status_code"] >= 500


def _body(answer: httpx.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(body := answer.json(), dict):
            return body
    return {"error": {"message": answer.text[:1000]}}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--name", default="vllm-filler")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--pool", default="rollout")
    parser.add_argument("--node", action="append", default=[], help="where it may run (default: any node of the pool)")
    parser.add_argument("--gpu-gb", type=float, help="of each GPU, awake")
    parser.add_argument("--residual-gb", type=float, default=2.0, help="of each GPU, asleep (default: %(default)s)")
    parser.add_argument("--ram-gb", type=float, help="its weights, asleep")
    parser.add_argument("--start", help="command that starts the server and returns; needs an admin")
    parser.add_argument("--stop", help="command that ends it")
    parser.add_argument("--load-s", type=float, default=60.0, help="how long it takes to start (default: %(default)s)")
    parser.add_argument("--yield-s", type=float, default=2.0)
    parser.add_argument("--at-once", type=int, default=64, help="requests at a time (default: %(default)s)")
    args = parser.parse_args()
    try:
        batch = Batch(args.requests, args.answers, args.url, max(1, args.at_once))
        args.answers.open("a").close()  # before the server works for nothing
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"the files of requests and answers: {type(error).__name__}: {error}")
    server: dict[str, Any] = {"driver": "vllm", "residual_gb": args.residual_gb, "load_s": args.load_s}
    server |= {name: size for name in ("gpu_gb", "ram_gb") if (size := getattr(args, name)) is not None}
    if args.node:
        server["named"] = args.node
    commands = {name: shlex.split(text) for name in ("start", "stop") if (text := getattr(args, name))}
    server["options"] = {"url": args.url, **commands}
    filler = dict(yield_s=args.yield_s, min_run_s=5 * args.yield_s)
    total = len(batch.todo)
    try:
        job = rollmuxd.ajob(args.name, filler=filler, pools={args.pool: server})
    except ValueError as error:
        parser.error(str(error))
    async with job:
        while batch.todo:
            with contextlib.suppress(rollmuxd.SlotLost):  # it comes again
                async with job.filler() as slot:
                    print(f"{len(batch.todo)} requests left", flush=True)
                    await batch.work(slot, args.yield_s / 2)
    print(f"{total - batch.failed} requests answered, {batch.failed} failed, {batch.again} sent again")


if __name__ == "__main__":
    asyncio.run(main())
