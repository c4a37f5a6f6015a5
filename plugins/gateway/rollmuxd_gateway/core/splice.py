"""Which request may be cut and continued on another replica, and with which change: one table, :data:`RULES`.

A response is a function of its prompt, its tokens so far, its sampling parameters, and counters over the output. The
KV cache follows from ids and weights. So ``prompt + generated`` continues the same distribution, if the weights are
the same and no parameter looks at the border between prompt and output. The table says of each parameter whether it
does. A parameter that is not in the table pins its request: a wrong continuation would go unnoticed.
"""

import hashlib
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rollmuxd_gateway.core.arrays import Ids
from rollmuxd_gateway.core.model import Replica, Request

#: tokens that a stop string may reach back at most
LONGEST_REWIND: Final = 64
#: tokens that end within one character of UTF-8, at most
WITHIN_CHARACTER: Final = 3


class Verdict(StrEnum):
    #: nothing changes
    MOVE = "move"
    #: it ends where it runs
    PIN = "pin"
    #: the last tokens are generated again, so that a stop string across the cut is found
    REWIND = "rewind"
    #: a new seed for each segment
    RESEED = "reseed"
    #: less what was generated
    REDUCE = "reduce"
    #: asked for in the first segment only
    FIRST = "first"


class Rule(NamedTuple):
    """What one parameter does to a move. ``when``: the values for which it counts."""

    parameter: str
    vllm: Verdict
    sglang: Verdict
    when: Callable[[Any], bool]


def _set(value: Any) -> bool:
    return value not in (None, False, "", 0, [], {})


def _always(value: Any) -> bool:
    return value is not None


def _not_one(value: Any) -> bool:
    return value not in (None, 1, 1.0)


def _structured(value: Any) -> bool:
    return _set(value) and not (isinstance(value, dict) and value.get("type") == "text")


_M, _P = Verdict.MOVE, Verdict.PIN
RULES: Final[tuple[Rule, ...]] = (
    # sampling that looks at the next token only
    *(
        Rule(name, _M, _M, _always)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "logit_bias",
            "allowed_token_ids",
            "ignore_eos",
            "stop_token_ids",
        )
    ),
    # data per token, and how text is made of ids
    *(
        Rule(name, _M, _M, _always)
        for name in (
            "logprobs",
            "top_logprobs",
            "return_tokens_as_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "no_stop_trim",
            "priority",
            "cache_salt",
            "user",
        )
    ),
    Rule("min_tokens", Verdict.REDUCE, Verdict.REDUCE, _always),
    # one generator per request starts again with each segment; see also Replica.positional_seed
    Rule("seed", Verdict.RESEED, Verdict.RESEED, _always),
    Rule("stop", Verdict.REWIND, Verdict.REWIND, _set),
    # counted over the output, of which a part has become prompt
    Rule("presence_penalty", _P, _P, _set),
    Rule("frequency_penalty", _P, _P, _set),
    # vLLM counts the prompt too, SGLang does not
    Rule("repetition_penalty", _M, _P, _not_one),
    # automata that begin at their root
    *(
        Rule(name, _P, _P, _structured)
        for name in (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "bad_words",
            "thinking_token_budget",
            "repetition_detection",
            "custom_logit_processor",
            "custom_params",
            "logits_processors",
            "use_beam_search",
            "return_hidden_states",
            "image_data",
            "truncate_prompt_tokens",
        )
    ),
    Rule("best_of", _P, _P, _not_one),
    # of the prompt
    Rule("prompt_logprobs", Verdict.FIRST, Verdict.FIRST, _always),
    Rule("echo", Verdict.FIRST, Verdict.FIRST, _always),
    # one adapter; the target has to list it
    Rule("lora_path", _M, _M, _always),
)
_BY_NAME: Final = {rule.parameter: rule for rule in RULES}


def verdicts(request: Request, engine: str) -> dict[str, Verdict]:
    """Of each parameter that counts, what it does to a move between replicas of this engine."""
    found: dict[str, Verdict] = {}
    for name, value in request.params.items():
        rule = _BY_NAME.get(name)
        if rule is None:
            if value is not None:
                found[name] = Verdict.PIN
        elif rule.when(value):
            found[name] = rule.sglang if engine == "sglang" else rule.vllm
    return found


def pin(request: Request) -> str:
    """Why the request has to end where it runs; empty: it may move."""
    if request.opaque is not None:
        return "it is passed on as it came"
    if request.prompt is None:
        return "the ids of its prompt are not known yet"
    pinned = [name for name, verdict in verdicts(request, request.engine).items() if verdict is Verdict.PIN]
    return f"{pinned[0]} is counted over the output, or not known to move" if pinned else ""


def refuses(request: Request, target: Replica, *, mix_versions: bool) -> str:
    """Why this target cannot continue the request, which may move in itself; empty: it can."""
    if not request.ids:
        return ""
    if target.weights != request.weights and not mix_versions:
        return f"its weights are version {target.weights}, and the tokens so far are of {request.weights}"
    if target.logprobs_mode != request.logprobs_mode:
        return f"its log-probabilities are {target.logprobs_mode}, and those so far {request.logprobs_mode}"
    if target.engine != request.engine:
        return f"it is {target.engine}, and the tokens so far are of {request.engine}"
    adapter = request.params.get("lora_path")
    if adapter and adapter not in target.adapters:
        return f"it has no adapter {adapter}"
    return ""


def rewind(request: Request) -> int:
    """Tokens at the end of which a stop string may have begun: no token of it is shorter than a byte."""
    stop = request.params.get("stop")
    if not stop:
        return 0
    strings = [stop] if isinstance(stop, str) else list(stop)
    return min(LONGEST_REWIND, max(len(string.encode()) for string in strings))


def withheld(request: Request) -> int:
    """Tokens at the end that a streamed client does not get yet: a cut may take them back."""
    back = rewind(request)
    return back + WITHIN_CHARACTER if back else 0


def continued(request: Request, target: Replica, generated: int) -> dict[str, Any]:
    """The parameters for a segment that begins after so many tokens; the first segment's are as the client said."""
    params = dict(request.params)
    if request.max_tokens is not None:
        params["max_tokens"] = request.max_tokens - generated
    if not generated:
        return params
    for name, verdict in verdicts(request, target.engine).items():
        match verdict:
            case Verdict.REDUCE:
                params[name] = max(0, int(params[name]) - generated)
            case Verdict.RESEED if not target.positional_seed:
                params[name] = reseeded(int(params[name]), generated)
            case Verdict.FIRST:
                del params[name]
            case _:
                pass
    return params


def reseeded(seed: int, offset: int) -> int:
    """Another seed for the segment at ``offset``: with the old one the random stream would begin again."""
    digest = hashlib.blake2b(f"{seed}:{offset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33  # engines take 31 bits everywhere


def joined(prompt: Ids, ids: Ids) -> Ids:
    """Prompt and generated ids, as one prompt."""
    return prompt + ids if ids else prompt
