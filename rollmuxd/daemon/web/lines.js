// Utilisation and bubbles over time, in the frame of the timeline below them. Drawn by uPlot.

const POOLS = ["--p1", "--p2", "--p3", "--p4"];

export class Lines {
  constructor(host) {
    this.host = host;
    this.shape = "";
    this.plot = null;
    this.frame = { from: 0, to: 1 };
  }

  /** ``pools``: by name, {used, bubble}; ``times``: the middles that they are of. */
  draw(pools, times, { from, to, gutter, width, marks, theme }) {
    const shape = [...pools.keys(), gutter, width, theme].join(" ");
    this.frame = { from, to };
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new window.uPlot(
        this._options([...pools.keys()], gutter, width, marks),
        [[0], ...[...pools].flatMap(() => [[null], [null]])],
        this.host,
      );
    }
    this.plot.setData([times, ...[...pools.values()].flatMap((pool) => [pool.used, pool.bubble])], false);
    this.plot.batch(() => {
      this.plot.setScale("x", { min: from, max: to });
      this.plot.setScale("y", { min: 0, max: 1 });
    });
  }

  colour(index) {
    return POOLS[index % POOLS.length];
  }

  _options(names, gutter, width, marks) {
    return {
      width,
      height: this.host.clientHeight,
      padding: [7, 0, 5, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => [this.frame.from, this.frame.to] }, y: { range: [0, 1] } },
      axes: [
        { show: false },
        {
          size: gutter,
          gap: 8,
          stroke: marks.get("--dim"),
          font: `10px ${marks.font}`,
          splits: () => [0, 0.5, 1],
          values: (_, all) => all.map((value) => `${value * 100} %`),
          grid: { stroke: marks.get("--line"), width: 1 },
          ticks: { show: false },
        },
      ],
      series: [
        {},
        ...names.flatMap((_, index) => {
          const stroke = marks.get(this.colour(index));
          return [
            { stroke, width: 1.6, points: { show: false } },
            { stroke, width: 1, dash: [3, 3], points: { show: false } },
          ];
        }),
      ],
    };
  }
}
