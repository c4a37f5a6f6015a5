// Reads {facts, nodes, pages, known, at} from stdin; prints, for each time, what the dashboard would draw of each node.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const load = (name) => import(pathToFileURL(`${folder}/${name}`).href);
const [{ History }, { Lanes, eachBar }, { usage }] = await Promise.all([
  load("history.js"),
  load("lanes.js"),
  load("measure.js"),
]);

const given = JSON.parse(readFileSync(0, "utf8"));
const history = new History();
for (const node of given.nodes) history.knowNode(node.node, node.gpus);
for (const page of given.pages) history.take(page, page[0].seq - 1, page[page.length - 1].seq);
for (const slot of given.slots) history.knowSlot(slot);
if (given.forget) history.forget(given.forget);
for (const { job, filler } of given.jobs) if (filler) history.fillers.add(job);
const lanes = new Lanes(history);
lanes.know(
  new Map(given.nodes.map((node) => [node.node, { gpus: node.gpus.length, status: node.status, jobs: node.jobs }])),
  new Map(given.jobs.map((job) => [job.job, job])),
);
const covering = (list, at) => list.filter(({ t0, t1 }) => t0 <= at && at < t1);
const found = given.at.map((at) => {
  const nodes = {};
  for (const { node } of given.nodes) {
    const lane = lanes.node(node);
    const bars = [];
    eachBar(lane, at, at + 1e-6, (bar) => bar.slot && bars.push([bar.slot.id, bar.kind, bar.share]));
    nodes[node] = {
      held: bars.sort(),
      status: covering(lane.backs, at).map(({ status }) => status),
      kept: covering(lane.kept, at)
        .map(({ job, pool, status }) => `${job} ${pool} ${status}`)
        .sort(),
      placed: covering(lanes.allocated(node), at).length,
    };
  }
  const jobs = {};
  for (const { job } of given.jobs) jobs[job] = covering(lanes.job(job).backs, at).map(({ status }) => status);
  return { nodes, jobs };
});
const shares =
  given.usage && usage(lanes, given.usage.pools, given.usage.from, given.usage.to, given.usage.count, given.usage.to);
const lists = [history.nodes, history.jobs, history.states, history.placements].flatMap((map) => [...map.values()]);
const marks = [...lists, ...[...history.slots.values()].map((slot) => slot.parts), history.starts].flat().length;
process.stdout.write(
  JSON.stringify({ found, shares: shares && Object.fromEntries(shares), events: history.events.length,
    slots: history.slots.size, marks }),
);
