"use strict";
// The page's behavior: one state (filters, limits, order) and one function that renders it. Text is only set as text.
(() => {
  const $ = (id) => document.getElementById(id);
  const ROWS_AT_FIRST = 200;
  const CURVES = 8;
  const WORKLOADS = 6; // workloads with separate plots
  const FEW = 100; // with fewer requests, high percentiles are unreliable
  const GLYPHS = "●■▲◆✚▼▶◀"; // glyphs of the shapes, for legends
  const SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"];
  const DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [10, 4], [1, 3], [6, 2, 1, 2]];
  const COLORS = [1, 2, 3, 4, 5, 6, 7, 8].map((n) => `var(--s${n})`);
  const NAMES = { ttft_ms: "TTFT", tpot_ms: "TPOT", itl_ms: "ITL", icl_ms: "ICL", e2e_ms: "End-to-end latency" };
  const LIMITS = { ttft_ms: "ttft", tpot_ms: "tpot", e2e_ms: "e2e" };
  let data;
  let cells;
  let palette; // precision -> index of its color, the same everywhere on the page
  let order = { column: null, down: false };
  let shownRows = ROWS_AT_FIRST;

  // one level of each cell, for the table

  const perUser = (level) => (level.tpot_ms?.p50 ? 1000 / level.tpot_ms.p50 : null);
  // The price of a million output tokens.
  const cost = (cell, gpus, level) => (cell.gpu_hour ? (cell.gpu_hour * gpus) / 0.0036 / level.out : null);

  function levelOf(cell, wanted) {
    if (wanted !== "lowest" && wanted !== "highest") return cell.levels.find((level) => level.key === wanted);
    const closed = cell.levels.some((level) => level.rate === null) ? cell.levels.filter((level) => level.rate === null) : cell.levels;
    return closed.at(wanted === "lowest" ? 0 : -1);
  }

  function shownAt(cell, level, path) {
    if (!level) return "";
    if (path === "per_user") return number(perUser(level));
    const spans = Number(cell.axes.tp ?? 1) * Number(cell.axes.pp ?? 1);
    if (path === "per_gpu") return level.out === null ? "" : number(level.out / spans);
    if (path === "cost") return level.out ? number(cost(cell, spans, level)) : "";
    if (path === "certainty") {
      const ends = level.ends?.out;
      if (ends) return ends.map(number).join(" to ");
      return level.out === null || level.requests === null ? "" : `of ${level.requests} requests`;
    }
    const [name, part] = path.split(".");
    return number(part ? level[name]?.[part] : level[name]);
  }

  // Put the values of the chosen level into the table. A column without any value is hidden.
  function showLevel() {
    const wanted = $("level")?.value ?? "highest";
    const keys = unique(cells.map((cell) => levelOf(cell, wanted)?.key).filter(Boolean));
    const at = keys.length === 1 ? `@${keys[0]}` : `@${wanted}`;
    [...$("cells-table").tHead.rows[0].cells].forEach((head, place) => {
      const path = head.dataset.level;
      if (!path) return;
      const button = head.querySelector("button");
      button.textContent = button.textContent.replace(/@\S+$/, at);
      const values = cells.map((cell) => (cell.row.cells[place].textContent = shownAt(cell, levelOf(cell, wanted), path)));
      head.dataset.empty = values.every((value) => value === "") ? "yes" : "";
    });
    fit();
  }

  // small tools

  function make(tag, properties = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in node && name !== "list") node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  async function unpack(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function number(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  }

  function seconds(value) {
    if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
    const whole = Math.round(value);
    const rest = `${Math.floor(whole / 60) % 60}`.padStart(whole >= 3600 ? 2 : 1, "0") + ":" + `${whole % 60}`.padStart(2, "0");
    return whole >= 3600 ? `${Math.floor(whole / 3600)}:${rest}` : rest;
  }

  const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  const soon = (work, wait = 120) => {
    let timer;
    return () => { clearTimeout(timer); timer = setTimeout(work, wait); };
  };
  const limited = () => [...Object.values(LIMITS), "accuracy"].some((id) => limit(id) !== null);
  const limit = (id) => ($(id).value === "" ? null : Number($(id).value));
  const statistic = () => $("statistic").value;
  const unique = (values) => [...new Set(values)];
  const breakable = (name) => name.split("/").flatMap((part, n) => (n ? ["/", make("wbr"), part] : [part]));
  const group = (cell) => cell.workload; // cells of other workloads, models or systems are not compared
  const numeric = (a, b) => a.localeCompare(b, undefined, { numeric: true });
  const colorOf = (precision) => COLORS[palette.get(String(precision)) ?? 0];
  const tint = (cell) => `k${(palette.get(String(cell.axes.precision)) ?? 0) + 1}`;
  const link = (cell) => make("a", { href: `#cell=${encodeURIComponent(cell.id)}` }, ...breakable(cell.name));

  function copying(words, text, fallback) {
    const button = make("button", { type: "button" }, words);
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch {
        if (fallback) getSelection().selectAllChildren(fallback);
        button.textContent = fallback ? "Selected: press Ctrl+C" : "Copying not permitted: open the cell";
      }
    });
    return button;
  }

  // One container per workload, with its name above it if there are several. Existing drawings stay.
  function places(id, names, inside) {
    const box = $(id);
    const wanted = JSON.stringify(names);
    if (box.dataset.names === wanted) return;
    box.dataset.names = wanted;
    box.replaceChildren(...names.flatMap((name, n) => [...(names.length > 1 ? [make("h3", {}, name)] : []), ...inside(n ? `-${n}` : "")]));
  }

  function fill(table, heads, rows) {
    // heads: [text, is a number]; rows: {values, mark}. The first column is the row header.
    const head = make("tr", {}, ...heads.map(([text, right]) => make("th", { scope: "col", className: right ? "number" : "" }, text)));
    table.tHead.replaceChildren(head);
    table.tBodies[0].replaceChildren(...rows.map(({ values, mark }) => make("tr", { className: mark ? "first" : "" }, ...values.map((value, n) =>
      n === 0 ? make("th", { scope: "row" }, value) : make("td", { className: heads[n][1] ? "number" : "" }, value ?? "")))));
  }

  // A level with what its data leaves out.
  function whole({ concurrency = null, rate = null, goodput = null, ...level }) {
    const key = rate === null ? `${concurrency}` : `${rate}/s`;
    return { ...level, concurrency, rate, goodput, key, at: rate === null ? `concurrency ${key}` : `${rate} requests/s` };
  }

  // selection

  function filtered() {
    const words = $("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = [...document.querySelectorAll("#filters select")].filter((select) => select.value !== "");
    return cells.filter((cell) =>
      wanted.every((select) => (select.name === "status" ? cell.status : String(cell.axes[select.name])) === select.value) &&
      words.every((word) => (word.startsWith("!") && word.length > 1 ? !cell.text.includes(word.slice(1)) : cell.text.includes(word))));
  }

  // A point is one cell at one concurrency or request rate. `misses` names the first SLO that it misses, or is null if it
  // meets all. A failed or unfinished cell meets none.
  function points(shown) {
    const at = statistic();
    const least = limit("accuracy");
    const metric = $("score").value;
    const keeps = accurate(shown, metric);
    return shown.flatMap((cell) => cell.levels.filter((level) => level.out !== null).map((level) => {
      const point = {
        cell, level, name: cell.name, at: level.at, out: level.out, perGpu: level.out / (cell.gpus || 1),
        user: perUser(level), cost: cost(cell, cell.gpus || 1, level),
        latency: Object.fromEntries(Object.keys(NAMES).map((name) => [name, level[name]?.[at] ?? null])), score: cell.accuracy[metric] ?? null,
      };
      point.kept = least === null ? keeps(cell) : point.score !== null && point.score >= least;
      point.misses = cell.unfit === null ? null : "all stages succeeded";
      point.lossless = keeps(cell);
      point.missed = [];
      point.share = 1; // the factor by which it misses the limit that it misses most
      const miss = (name, words, share) => { point.misses ??= name; point.missed.push(words); point.share = Math.max(point.share, share); };
      for (const [name, id] of Object.entries(LIMITS)) {
        const most = limit(id), label = NAMES[name], due = level.due?.[name], judged = due ?? level[name];
        if (most === null) continue;
        // The schedule's time in an open loop. Without a p99, the maximum.
        const value = judged?.[at] ?? (at === "p99" ? judged?.max : null) ?? null;
        if (value === null) miss(label, `${label}, which was not measured`, Infinity);
        else if (!(value <= most)) miss(label, `${label} ${number(value)} ms > ${number(most)} ms${due ? " from the schedule" : ""}`, value / most);
      }
      if (least !== null && !(point.score !== null && point.score >= least)) miss(metric, point.score === null ? `${metric}, which was not measured` : `${metric} ${point.score.toFixed(3)} < ${least}`, point.score ? least / point.score : Infinity);
      return point;
    }));
  }

  // A point's 95% interval. undefined if it is unknown.
  const ends = (point, metric) => (metric === "out" || statistic() === "p50" ? point.level.ends?.[metric] : undefined);

  // Half the width of an interval, as a logarithm.
  const half = ([low, high]) => Math.log(high / low) / 2;

  // Whether the difference between two points is within noise, computed as `pipeline recommend` does: from their repeats, or
  // with one of them from their intervals, added in quadrature.
  function tied(a, b, metric) {
    const logs = [a, b].map((point) => (metric === "out" ? point.level.repeats : []).map((rate) => Math.log((rate / point.out) * point.perGpu)));
    if (logs.every((each) => each.length > 1 && each.every(Number.isFinite))) return Math.abs(mean(logs[0]) - mean(logs[1])) <= welch(logs);
    const value = (point) => (metric === "out" ? point.perGpu : point.latency[metric]);
    const known = [a, b].map((point) => ends(point, metric));
    return known.every(Boolean) && Math.abs(Math.log(value(a) / value(b))) <= Math.hypot(...known.map(half));
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  // Half the width of Welch's 95% interval of the difference of the means of two samples.
  function welch(samples) {
    const parts = samples.map((of) => of.reduce((sum, value) => sum + (value - mean(of)) ** 2, 0) / (of.length - 1) / of.length);
    const spread = parts[0] + parts[1];
    if (!spread) return 0;
    const free = Math.floor(spread ** 2 / parts.reduce((sum, part, n) => sum + part ** 2 / (samples[n].length - 1), 0));
    return data.t[Math.min(Math.max(free, 1), data.t.length) - 1] * Math.sqrt(spread);
  }

  // Less to pay for: fewer GPUs, a smaller engine, less to build, a smaller batch.
  const expense = (cell) => [cell.gpus, cell.engine_size_bytes ?? 0, cell.preparation_s ?? 0, cell.axes.max_batch_size ?? 0];
  function lessExpensive(a, b) {
    const [one, other] = [expense(a.cell), expense(b.cell)];
    const n = one.findIndex((value, place) => value !== other[place]);
    return n < 0 ? 0 : one[n] - other[n];
  }

  // What a cell does at a level, if another batch size changes nothing: not more requests in flight than the batch holds.
  function work(point) {
    const { max_batch_size: batch, ...axes } = point.cell.axes;
    const { concurrency, key } = point.level;
    return concurrency !== null && concurrency <= batch ? JSON.stringify([group(point.cell), axes, key]) : null;
  }

  const median = (values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.ceil((sorted.length - 1) / 2)]) / 2;
  };

  // One point of each work, of the least expensive cell, with the medians of all: cells that do the same work are one.
  function withoutTwins(all) {
    const works = new Map();
    for (const point of all) works.set(work(point) ?? point, [...(works.get(work(point) ?? point) ?? []), point]);
    return [...works.values()].map((twins) => {
      if (twins.length === 1) return twins[0];
      const [first] = twins.sort(lessExpensive);
      const ttft = twins.map((point) => point.latency.ttft_ms).filter((value) => value !== null);
      const out = median(twins.map((point) => point.out));
      const latency = { ...first.latency, ttft_ms: ttft.length ? median(ttft) : null };
      const both = { out: pooled(out, twins.map((point) => [point.out, point.level.ends?.out])), ttft_ms: pooled(latency.ttft_ms, twins.map((point) => [point.latency.ttft_ms, point.level.ends?.ttft_ms])) };
      return { ...first, alike: twins.length, out, perGpu: median(twins.map((point) => point.perGpu)), latency, level: { ...first.level, repeats: [], ends: both } };
    });
  }

  // The interval around a median of [value, interval] pairs, at least as wide as their range. undefined if one is unknown.
  function pooled(middle, pairs) {
    if (pairs.some(([value, known]) => !value || !known)) return undefined;
    const logs = pairs.map(([value]) => Math.log(value));
    const width = Math.max(Math.hypot(...pairs.map(([, known]) => half(known))) / pairs.length, (Math.max(...logs) - Math.min(...logs)) / 2);
    return [middle * Math.exp(-width), middle * Math.exp(width)];
  }

  // The points that are within noise of the best, one of each cell, the least expensive first.
  function leaders(ranked, metric, compare) {
    const [first] = ranked;
    const alike = ranked.filter((point) => (metric === "score" ? point.score >= (first.cell.accuracy_intervals[$("score").value]?.[0] ?? first.score) : point === first || tied(first, point, metric)));
    const ofCells = alike.filter((point, n) => alike.findIndex((other) => other.cell === point.cell) === n);
    return ofCells.sort(metric === "score" ? compare : lessExpensive);
  }

  const cheaper = (a, b) => b.perGpu - a.perGpu || (a.latency.ttft_ms ?? Infinity) - (b.latency.ttft_ms ?? Infinity);

  function take(shown, all) {
    const good = all.filter((point) => point.misses === null);
    const gpus = shown.some((cell) => cell.gpus > 0);
    const best = gpus ? "Highest throughput per GPU" : "Highest throughput";
    const scored = all.some((point) => point.score !== null);
    const groups = unique(shown.map(group));
    const strict = scored && limit("accuracy") === null; // without a limit, the page excludes clearly less accurate cells
    const goals = [
      [strict ? `${best}, accuracy preserved` : best, cheaper, (point) => point.kept],
      ...(strict ? [[`${best}, any accuracy`, cheaper, () => true]] : []),
      ["Lowest TTFT", (a, b) => a.latency.ttft_ms - b.latency.ttft_ms, (point) => point.latency.ttft_ms !== null && point.kept],
      ["Highest accuracy, then throughput", (a, b) => b.score - a.score || cheaper(a, b), (point) => point.score !== null && point.lossless],
    ].slice(0, groups.length > 3 ? 1 : 4);
    const cards = [];
    let verdict = null; // the first card's point, and how many are tied with it
    for (const one of groups) {
      let kept = null; // the best point with preserved accuracy
      goals.forEach(([goal, compare, possible], place) => {
        const ranked = withoutTwins(good.filter((point) => group(point.cell) === one && possible(point))).sort(compare);
        if (!ranked.length) return;
        const metric = compare === cheaper ? "out" : goal.startsWith("Lowest") ? "ttft_ms" : "score";
        const [first, ...others] = leaders(ranked, metric, cheaper);
        const words = `${groups.length > 1 ? `${one}: ` : ""}${goal}${others.length ? ` (tie of ${others.length + 1}, the cheapest)` : ""}`;
        if (place === 0) kept = first;
        else if (compare === cheaper && first === kept) return; // identical for any accuracy
        verdict ??= { ...first, ties: others.length };
        const next = ranked.find((point) => point.cell !== first.cell);
        const behind = next && compare === cheaper ? ` (${((next.perGpu / first.perGpu - 1) * 100).toFixed(0)}%)` : "";
        cards.push(card(words, first, metric, gpus, next && make("span", {}, "next: ", link(next.cell), ` @${next.level.key}${behind}`)));
      });
    }
    $("cards").replaceChildren(...cards);
    const at = statistic();
    const lost = {};
    for (const point of all) {
      if (point.misses === null) continue;
      const cause = point.cell.unfit === null ? `by ${point.misses}` : "from failed or unfinished cells";
      lost[cause] = (lost[cause] ?? 0) + 1;
    }
    const why = Object.entries(lost).map(([cause, n]) => `${n} ${cause}`).join(", ");
    let text;
    if (!all.length) text = "The selected cells have no measurements.";
    else if (all.every((point) => point.cell.unfit !== null)) text = "None of the selected cells completed all its stages, so none can be recommended. The table of cells gives the reasons.";
    else if (!limited()) text = `Best of ${counted(all.length, "measured point")} of ${counted(unique(all.map((point) => point.cell)).length, "cell")}${why ? `; excluded: ${why}` : ""}. No SLOs are set: enter the latencies your users accept.`;
    else if (good.length) text = `Best of ${good.length} that meet the SLOs, out of ${counted(all.length, "measured point")}${why ? `; excluded: ${why}` : ""}.`;
    else text = `None of ${counted(all.length, "measured point")} meets the SLOs; excluded: ${why}. ${nearest(all)}`;
    if (scored && good.length && !good.some((point) => point.lossless)) text += " None of them preserves the accuracy.";
    if (strict && good.length) text += ` Accuracy counts as preserved unless ${$("score").value} is significantly (95%) below the unquantized cell or, without one, the most accurate cell.`;
    const fewest = Math.min(...all.map((point) => point.level.ttft_ms?.n ?? Infinity));
    if (at === "p99" && fewest < FEW) text += ` No p99 is shown of fewer than ${FEW} requests; limits are held against their maximum.`;
    else if (at === "p95" && fewest < FEW) text += ` The ${at} of ${counted(fewest, "request")} is little more than their maximum.`;
    $("take-why").textContent = text;
    const name = verdict && make("b", {}, ...breakable(verdict.cell.name));
    const opening = verdict?.ties ? `Tie of ${verdict.ties + 1}, the cheapest: ` : "Best: ";
    $("verdict").replaceChildren(...(verdict ? [opening, name, ` at ${verdict.at}, ${number(gpus ? verdict.perGpu : verdict.out)} tok/s${gpus ? " per GPU" : ""}${limited() ? " within the SLOs" : ""}.`] : [text]));
    return good;
  }

  // The 95% interval of a point's main metric, or the number of requests that it is from.
  function certainty(point, metric) {
    if (metric === "score") return "";
    const known = ends(point, metric);
    const gpus = metric === "out" ? point.out / point.perGpu : 1;
    if (known) return `95%: ${known.map((end) => number(end / gpus)).join(" to ")}`;
    return point.level.requests === null ? "" : `of ${counted(point.level.requests, "request")}`;
  }

  // A card for the best point of a goal, with its main metric in large type.
  function card(goal, point, metric, gpus, next) {
    const at = statistic();
    const { repeats } = point.level;
    const spread = repeats.length > 1 ? ` (${number(Math.min(...repeats))}–${number(Math.max(...repeats))})` : "";
    const ends = point.cell.accuracy_intervals[$("score").value];
    const range = ends ? ` (${ends[0].toFixed(2)} to ${ends[1].toFixed(2)})` : "";
    const shown = {
      out: [number(gpus ? point.perGpu : point.out), `${gpus ? "tok/s per GPU" : "tok/s"}${gpus ? "" : spread}`],
      ttft_ms: [number(point.latency.ttft_ms), `ms TTFT ${at}`],
      tpot_ms: [number(point.latency.tpot_ms), `ms TPOT ${at}`],
      user: [number(point.user), "tok/s per user"],
      cost: [point.cost === null ? "" : `$${point.cost.toFixed(2)}`, "per million tokens"],
      certainty: [certainty(point, metric), ""],
      score: [point.score === null ? "" : point.score.toFixed(2), `${$("score").value}${range}`],
      alike: [point.alike ? `medians of ${point.alike} cells` : "", "that do the same work"],
    };
    const rest = Object.entries(shown).filter(([name, [value]]) => name !== metric && value !== "").map(([, [value, unit]]) => `${value} ${unit}`);
    return make("article", { className: `card ${tint(point.cell)}` }, make("h3", {}, goal),
      make("div", { className: "figure" }, shown[metric][0], " ", make("small", {}, shown[metric][1])),
      make("div", {}, make("span", { className: "dot hue" }), link(point.cell), ` at ${point.at}`, badge(point.cell)),
      make("div", { className: "quiet" }, rest.join(" · ")),
      next ? make("div", { className: "quiet" }, next) : null,
      point.cell.launch ? copying("Copy launch command", point.cell.launch) : null);
  }

  // The number of warnings about a measurement. The details of the cell have their texts.
  function badge(cell) {
    const warnings = cell.findings.filter((text) => !text.startsWith("info:"));
    return warnings.length ? make("a", { className: "badge", href: `#cell=${encodeURIComponent(cell.id)}`, title: warnings.join("\n") }, counted(warnings.length, "warning")) : null;
  }

  // Whether a cell's accuracy is preserved: not clearly below the unquantized cell by the paired 95% interval of the
  // difference. Without that interval: not below the 95% interval of the group's most accurate cell with the same questions.
  function accurate(shown, metric) {
    const floors = new Map();
    const same = (cell) => JSON.stringify([group(cell), cell.asked]);
    for (const cell of shown) {
      const score = cell.accuracy[metric];
      const best = floors.get(same(cell));
      if (cell.unfit === null && score !== undefined && (best === undefined || score > best.score)) floors.set(same(cell), { score, low: cell.accuracy_intervals[metric]?.[0] ?? score });
    }
    return (cell) => {
      const change = cell.accuracy_drift?.scores?.[metric];
      if (change?.interval) return change.interval[1] >= 0;
      const floor = floors.get(same(cell));
      return floor === undefined || (cell.accuracy[metric] !== undefined && cell.accuracy[metric] >= floor.low);
    };
  }

  function nearest(all) {
    const fit = all.filter((point) => point.cell.unfit === null);
    const [first] = fit.sort((a, b) => a.share - b.share);
    return first ? `Nearest: ${first.name} at ${first.at} misses ${first.missed.join(", ")}.` : "";
  }

  // the table of cells

  function showTable(shown, good) {
    const best = new Map();
    for (const point of good) if (!best.has(point.cell.id) || best.get(point.cell.id).out < point.out) best.set(point.cell.id, point);
    const visible = new Set(shown.map((cell) => cell.id));
    const body = $("cells-table").tBodies[0];
    for (const cell of cells) {
      const point = best.get(cell.id);
      if (cell.best) cell.best.textContent = point ? `${number(point.out)} @${point.level.key}` : "";
    }
    const place = order.column;
    const value = (cell) => {
      const text = place === 0 ? cell.name : cell.row.cells[place].textContent.trim();
      const parsed = Number.parseFloat(text);
      return place > 0 && !Number.isNaN(parsed) ? parsed : text;
    };
    const sorted = place === null ? [...cells] : cells.map((cell) => [value(cell), cell]).sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // missing values stay last in either direction
      const way = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
      return order.down ? -way : way;
    }).map(([, cell]) => cell);
    let rows = 0;
    for (const cell of sorted) cell.row.hidden = !visible.has(cell.id) || ++rows > shownRows;
    body.append(...sorted.map((cell) => cell.row));
    const more = $("more");
    more.hidden = rows <= shownRows;
    more.textContent = `Show all ${rows} cells`;
    return sorted.filter((cell) => visible.has(cell.id));
  }

  function bestColumn() {
    const title = "highest output throughput among its load levels that meet the SLOs";
    $("cells-table").tHead.rows[0].cells[0].after(make("th", { scope: "col", className: "number", title }, "best tok/s"));
    for (const cell of cells) cell.row.cells[0].after((cell.best = make("td")));
  }

  // In a wide window the table is not cut off. Columns that do not fit are hidden, highest rank first, as on a terminal.
  function fit() {
    const table = $("cells-table");
    const box = table.parentElement;
    const heads = [...table.tHead.rows[0].cells];
    const show = (head, shown) => { for (const row of table.rows) row.cells[heads.indexOf(head)].hidden = !shown; };
    for (const head of heads) show(head, !head.dataset.empty);
    const left = [];
    $("unfit").textContent = "";
    const byRank = heads.filter((head) => head.dataset.rank > 2 && !head.dataset.empty).sort((a, b) => a.dataset.rank - b.dataset.rank);
    while (matchMedia("(min-width: 64rem)").matches && box.scrollWidth > box.clientWidth + 1 && byRank.length) {
      const head = byRank.pop();
      left.unshift(head.firstChild.textContent);
      show(head, false);
      $("unfit").textContent = ` Hidden for lack of space: ${left.join(", ")} (see a wider window or the CSV).`;
    }
  }

  function sortable() {
    const heads = [...$("cells-table").tHead.rows[0].cells];
    heads.forEach((head, place) => {
      const button = make("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const firstDown = head.classList.contains("number") && !/ms|build|engine/.test(button.textContent);
        order = order.column === place ? { column: place, down: !order.down } : { column: place, down: firstDown };
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        show();
      });
    });
    const more = make("button", { id: "more", type: "button", className: "more", hidden: true });
    more.addEventListener("click", () => { shownRows = Infinity; show(); fit(); });
    $("cells-table").parentElement.after(more);
  }

  // plots

  const CONFIG = {
    background: null, font: "system-ui, sans-serif", view: { stroke: null },
    axis: { labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: 200, labelOverlap: true },
    legend: { orient: "top", labelFontSize: 12, titleFontSize: 12, labelLimit: 260, symbolStrokeWidth: 2, title: null },
    aria: false,
  };
  const plots = new Map();

  async function plot(id, description, spec) {
    const box = $(id);
    if (!window.vegaEmbed || box.closest("[hidden]")) return;
    const turn = (plots.get(id)?.turn ?? 0) + 1;
    plots.get(id)?.view?.finalize();
    plots.set(id, { turn });
    const whole = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", autosize: { type: "fit-x", contains: "padding" }, config: { ...CONFIG, legend: { ...CONFIG.legend, columns: box.clientWidth < 600 ? 2 : 8 } }, ...spec };
    const drawing = make("div", { className: "plot" });
    box.replaceChildren(drawing);
    const { view } = await vegaEmbed(drawing, whole, { mode: "vega-lite", ast: true, actions: false, defaultStyle: false, renderer: "svg", tooltip: tip });
    if (plots.get(id).turn !== turn) { view.finalize(); return; }
    plots.get(id).view = view;
    drawing.setAttribute("role", "img");
    drawing.firstElementChild.setAttribute("aria-hidden", "true");
    drawing.setAttribute("aria-label", description);
    view.addEventListener("click", (_, item) => { if (item?.datum?.cell) location.hash = `cell=${encodeURIComponent(item.datum.cell)}`; });
  }

  function tip(_, event, __, value) {
    const box = $("tip");
    box.hidden = value === null || value === undefined || value === "";
    if (box.hidden) return;
    box.textContent = typeof value === "object" ? Object.entries(value).map(([name, text]) => `${name}: ${text}`).join("\n") : String(value);
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    box.style.top = `${event.clientY + height + 18 > innerHeight ? event.clientY - height - 10 : event.clientY + 14}px`;
  }

  const wide = (values) => values.length > 1 && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 30;
  const scale = (values, extra = {}) => (wide(values) ? { type: "log", ...extra } : { zero: false, nice: true, ...extra });
  const description = (point) => [
    point.name, point.at, ...(point.level.goodput === null ? [] : [`goodput ${point.level.goodput.toFixed(2)}`]), `${number(point.out)} output tokens/s${point.cell.gpus > 1 ? `, ${number(point.perGpu)} per GPU` : ""}`,
    ...Object.entries(NAMES).filter(([name]) => point.latency[name] !== null).map(([name, text]) => `${text} ${number(point.latency[name])} ms (${statistic()} of ${point.level[name]?.n ?? "?"})`),
    ...(point.user === null ? [] : [`${number(point.user)} tokens/s per user`]), ...(point.cost === null ? [] : [`$${point.cost.toFixed(2)} per million output tokens`]),
    ...(point.score === null ? [] : [`${$("score").value} ${point.score.toFixed(2)}`]), ...(point.kept ? [] : ["accuracy not preserved"]), ...(point.cell.unfit !== null ? [point.cell.unfit] : point.misses ? [`misses the SLO: ${point.misses}`] : []),
  ].join("\n");

  // `rising`: a larger x is better, as for the speed of a user.
  function front(known, rising) {
    const points = [];
    for (const point of [...known].sort((a, b) => (rising ? b.x - a.x : a.x - b.x) || b.y - a.y)) if (!points.length || point.y > points[points.length - 1].y) points.push(point);
    return points;
  }

  function pareto(all) {
    $("pareto").hidden = !window.vegaEmbed || !all.length;
    const key = $("latency").value;
    const axis = $("color").value;
    const gpus = unique(all.map((point) => point.cell.gpus)).length > 1;
    const ofUser = key === "user";
    const at = (point) => (ofUser ? point.user : point.latency[key]);
    const known = all.filter((point) => at(point) !== null).map((point) => ({
      x: at(point), y: gpus ? point.perGpu : point.out, kind: axis === "" ? "all" : String(point.cell.axes[axis]), group: group(point.cell), holds: point.misses === null, kept: point.kept, cell: point.cell.id, text: description(point), point,
    }));
    const fronts = unique(known.map((point) => point.group)).flatMap((one) => front(known.filter((point) => point.group === one && point.kept && point.point.cell.unfit === null), ofUser));
    const on = new Set(fronts);
    for (const point of known) point.rank = on.has(point) ? "front" : point.holds ? "holds" : "misses";
    const latency = ofUser ? "Output tokens/s per user (1 / median TPOT)" : `${NAMES[key]}, ms (${statistic()})`;
    const speed = `Output tokens/s${gpus ? " per GPU" : ""}`;
    const groups = unique(known.map((point) => point.group));
    places("pareto-plots", groups.length ? groups.slice(0, WORKLOADS) : [""], (n) => [make("div", { className: "plot", id: `pareto-plot${n}` })]);
    $("pareto-plot").hidden = !known.length;
    groups.slice(0, WORKLOADS).forEach((one, n) => {
      const of = (point) => point.group === one;
      scatter(n ? `pareto-plot-${n}` : "pareto-plot", known.filter(of), fronts.filter(of), axis, latency, speed, key in LIMITS ? limit(LIMITS[key]) : null);
    });
    fill($("front"), [["cell", false], ["load", false], [speed, true], [latency, true], ["meets the SLOs", false]],
      fronts.sort((a, b) => b.y - a.y).map((one) => ({ values: [link(one.point.cell), one.point.at, number(one.y), number(one.x), one.holds ? "yes" : `no: ${one.point.misses}`] })));
    $("pareto-note").textContent = [
      known.some((point) => !point.kept) ? "Hollow points: accuracy not preserved, excluded from the Pareto front." : "",
      known.some((point) => point.point.cell.unfit !== null) ? "Faint points: failed or unfinished cells, excluded from the Pareto front." : "",
      groups.length > 1 ? `Only cells with the same workload and system are compared: one plot per ${data.apart.join(", ")}.` : "",
      groups.length > WORKLOADS ? `The first ${WORKLOADS} of ${groups.length} workloads are drawn; filter the cells to see the others.` : "",
    ].join(" ");
  }

  function scatter(id, known, fronts, axis, latency, speed, most) {
    const kinds = unique(known.map((point) => point.kind)).sort(numeric);
    const rule = most !== null;
    const xs = known.map((point) => point.x).concat(rule ? [most] : []);
    const plain = ({ point, ...rest }) => rest;
    const x = { field: "x", type: "quantitative", title: latency, scale: scale(xs) };
    const y = { field: "y", type: "quantitative", title: speed, scale: { zero: true, nice: true } };
    const hues = axis === "precision" ? kinds.map(colorOf) : COLORS;
    const shapes = axis === "precision" ? kinds.map((kind) => SHAPES[palette.get(kind)]) : SHAPES;
    const color = kinds.length > 1 || axis === "precision" ? { color: { field: "kind", type: "nominal", scale: { domain: kinds, range: hues } }, shape: { field: "kind", type: "nominal", scale: { domain: kinds, range: shapes } } } : { color: { value: COLORS[0] } };
    plot(id, `Scatter plot of ${counted(known.length, "point")}: ${speed} against ${latency}. ${counted(fronts.length, "point")} on the Pareto front, listed in the table below.`, {
      height: 380,
      layer: [
        ...(fronts.length ? [{ data: { values: fronts.map(plain) }, mark: { type: "line", interpolate: "step-after", strokeWidth: 1.5, strokeDash: [5, 3], opacity: 0.8, color: "var(--quiet)" }, encoding: { x, y, order: { field: "x" } } }] : []),
        { data: { values: known.map(plain) }, mark: { type: "point", cursor: "pointer", strokeWidth: 1.5 }, encoding: { x, y, ...color, fill: color.color, tooltip: { field: "text" },
          size: { condition: { test: "datum.rank == 'front'", value: 110 }, value: 55 }, fillOpacity: { condition: { test: "datum.kept", value: 1 }, value: 0 },
          opacity: { condition: [{ test: "datum.rank == 'front'", value: 1 }, { test: "datum.rank == 'holds'", value: 0.55 }], value: 0.18 } } },
        ...(rule ? [
          { data: { values: [{ x: most }] }, mark: { type: "rule", strokeWidth: 2, color: "var(--bad)" }, encoding: { x } },
          { data: { values: [{ x: most, text: `SLO ${number(most)} ms` }] }, mark: { type: "text", align: "left", dx: 4, baseline: "top", color: "var(--bad)" }, encoding: { x, y: { value: 2 }, text: { field: "text" } } },
        ] : []),
      ],
    });
  }

  function curves(inOrder) {
    const measured = inOrder.filter((cell) => cell.levels.length);
    $("curves").hidden = !window.vegaEmbed || !measured.some((cell) => cell.levels.length > 1);
    if ($("curves").hidden) return;
    const groups = unique(measured.map(group));
    const drawn = groups.slice(0, WORKLOADS);
    const of = drawn.map((one) => measured.filter((cell) => group(cell) === one));
    const most = Math.max(...of.map((members) => members.length));
    $("curves-note").textContent = [
      most > CURVES ? `The first ${CURVES} of ${counted(most, "cell")}${drawn.length > 1 ? " at most" : ""} in table order; sort or filter the table to see others.` : "All cells in the table.",
      groups.length > WORKLOADS ? `The first ${WORKLOADS} of ${groups.length} workloads.` : "",
    ].join(" ");
    // Closed loops if there are any, otherwise open ones. They have different axes.
    const load = measured.some((cell) => cell.levels.some((level) => level.rate === null)) ? "concurrency" : "requests/s";
    $("curves-head").textContent = `Scaling with ${load}`;
    places("curve-plots", drawn, (n) => [
      make("div", { className: "grid" }, ...["ttft", "tpot", "out"].map((name) => make("div", { className: "plot", id: `curve-${name}${n}` }))),
      make("div", { className: "legend", id: `curve-legend${n}` }),
    ]);
    of.forEach((members, n) => lines(members.slice(0, CURVES), load, n ? `-${n}` : ""));
  }

  // One line per cell. Its color shows the precision. Shapes and dashes separate cells of the same precision.
  function lines(chosen, load, suffix) {
    const twin = (cell, n) => chosen.slice(0, n).filter((other) => other.axes.precision === cell.axes.precision).length;
    $(`curve-legend${suffix}`).replaceChildren(...chosen.map((cell, n) => make("span", { className: tint(cell) }, make("b", { className: "dot", ariaHidden: "true" }, `${GLYPHS[twin(cell, n)]} `), link(cell), cell.unfit === null ? "" : ` (${cell.status})`)));
    const at = statistic();
    const of_load = load === "concurrency" ? load : "rate";
    const names = chosen.map((cell) => cell.name);
    const kind = (range) => ({ field: "name", type: "nominal", scale: { domain: names, range }, legend: null });
    const draw = (id, title, of) => {
      const values = chosen.flatMap((cell) => cell.levels.filter((level) => level[of_load] !== null).map((level) => ({ c: level[of_load], v: of(level), at: level.at, name: cell.name, cell: cell.id })).filter((one) => one.v !== null && one.v !== undefined));
      for (const one of values) one.text = `${one.name}\n${one.at}\n${title}: ${number(one.v)}`;
      $(id).hidden = !values.length;
      if (!values.length) return;
      const steps = unique(values.map((one) => one.c)).sort((a, b) => a - b);
      const color = kind(chosen.map((cell) => colorOf(cell.axes.precision)));
      plot(id, `${title} by ${load} ${steps.join(", ")} for ${counted(chosen.length, "cell")}: ${chosen.map((cell) => `${cell.name}: ${values.filter((one) => one.cell === cell.id).map((one) => number(one.v)).join(", ")}`).join("; ")}.`, {
        data: { values }, height: 240,
        encoding: {
          x: { field: "c", type: "quantitative", title: load, scale: { ...(steps[0] > 0 && steps.length > 2 ? { type: "log", base: 2 } : { zero: false }), nice: false, padding: 10 }, axis: { values: steps, format: "~g" } },
          y: { field: "v", type: "quantitative", title, scale: scale(values.map((one) => one.v), wide(values.map((one) => one.v)) ? {} : { zero: true }) },
          color, tooltip: { field: "text" },
        },
        layer: [
          { mark: { type: "line", strokeWidth: 2 }, encoding: { strokeDash: kind(chosen.map((cell, n) => DASHES[twin(cell, n)])) } },
          { mark: { type: "point", size: 55, filled: true, opacity: 1 }, encoding: { shape: kind(chosen.map((cell, n) => SHAPES[twin(cell, n)])) } },
        ],
      });
    };
    draw(`curve-ttft${suffix}`, `TTFT, ms (${at})`, (level) => level.ttft_ms?.[at]);
    draw(`curve-tpot${suffix}`, `TPOT, ms (${at})`, (level) => level.tpot_ms?.[at]);
    draw(`curve-out${suffix}`, "Output tokens/s", (level) => level.out);
  }

  function precision(shown) {
    const metric = $("score").value;
    const scored = shown.filter((cell) => cell.accuracy[metric] !== undefined);
    $("precision").hidden = !scored.length;
    if (!scored.length) return;
    const groups = new Map();
    for (const cell of scored) {
      const key = JSON.stringify([cell.axes.model, cell.axes.precision]);
      groups.set(key, [...(groups.get(key) ?? []), cell]);
    }
    const lines = [...groups].map(([key, members]) => {
      const scores = members.map((cell) => cell.accuracy[metric]);
      const [model, kind] = JSON.parse(key);
      const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
      const typical = members.reduce((a, b) => (Math.abs(b.accuracy[metric] - mean) < Math.abs(a.accuracy[metric] - mean) ? b : a));
      const [low, high] = typical.accuracy_intervals[metric] ?? [null, null];
      return { model, kind, mean, low, high, questions: typical.accuracy_total, change: typical.accuracy_drift?.scores?.[metric], agreement: typical.accuracy_drift?.agreement, n: members.length, least: Math.min(...scores), most: Math.max(...scores) };
    });
    const models = unique(lines.map((line) => line.model));
    const range = (ends) => (ends ? `${ends[0].toFixed(3)} to ${ends[1].toFixed(3)}` : "");
    const drifts = lines.some((line) => line.change);
    const many = models.length > 1;
    fill($("precision-table"), [["precision", false], ...(many ? [["model", false]] : []), ["cells", true], [metric, true], ["95% interval", true], ...(drifts ? [["change", true], ["95% interval of change", true], ["agreement", true]] : []), ["questions", true]],
      lines.map((line) => ({ values: [line.kind, ...(many ? [line.model] : []), String(line.n), line.mean.toFixed(3) + (line.most - line.least >= 0.0005 ? ` (${line.least.toFixed(3)}–${line.most.toFixed(3)})` : ""), line.low === null ? "" : range([line.low, line.high]),
        ...(drifts ? [line.change ? `${line.change.difference > 0 ? "+" : ""}${line.change.difference.toFixed(3)}` : "", range(line.change?.interval), line.agreement === undefined ? "" : `${(line.agreement * 100).toFixed(0)}%`] : []), String(line.questions ?? "")] })));
    $("precision-caption").textContent = `Mean ${metric} of the cells of each precision. Intervals${drifts ? ", and the change from and agreement with the unquantized cell," : ""} are those of the cell nearest to the mean.`;
    for (const line of lines) line.text = `${line.kind}${many ? `, ${line.model}` : ""}\n${metric} ${line.mean.toFixed(3)}, ${counted(line.n, "cell")}${line.low === null ? "" : `\n95% interval of ${counted(line.questions, "question")}: ${range([line.low, line.high])}`}`;
    const y = { field: "kind", type: "nominal", title: null, sort: unique(lines.map((line) => line.kind)) };
    const few = many && models.length <= COLORS.length;
    const color = { field: "kind", type: "nominal", scale: { domain: y.sort, range: y.sort.map(colorOf) }, legend: null };
    const marks = { color, ...(few ? { yOffset: { field: "model" } } : {}) };
    const shape = few ? { shape: { field: "model", type: "nominal", scale: { domain: models, range: SHAPES } } } : {};
    plot("accuracy-plot", `${metric} per precision: ${lines.slice(0, 12).map((line) => `${line.kind} ${line.mean.toFixed(2)}`).join(", ")}. The table below lists all.`, {
      data: { values: lines }, height: Math.max(70, y.sort.length * (few ? 10 + 12 * models.length : 30)),
      layer: [
        { mark: { type: "rule", strokeWidth: 2, opacity: 0.5 }, encoding: { y, x: { field: "low", type: "quantitative" }, x2: { field: "high" }, ...marks, tooltip: { field: "text" } } },
        { mark: { type: "point", filled: true, size: 90 }, encoding: { y, x: { field: "mean", type: "quantitative", title: `${metric}${lines.some((line) => line.low !== null) ? ", with 95% interval" : ""}`, scale: { domain: [0, 1] } }, ...marks, ...shape, tooltip: { field: "text" } } },
        ...(limit("accuracy") === null ? [] : [{ data: { values: [{ least: limit("accuracy") }] }, mark: { type: "rule", strokeWidth: 2, color: "var(--bad)" }, encoding: { x: { field: "least", type: "quantitative" } } }]),
      ],
    });
  }

  function timeline() {
    const kinds = unique(data.stages.map((stage) => stage.stage));
    const bars = data.stages.flatMap((stage) => stage.attempts.map(([start, end, outcome]) => ({ stage, start, end, outcome })));
    $("gantt").hidden = !window.vegaEmbed || !bars.length;
    if (!bars.length) return;
    const lanes = new Map(kinds.map((kind) => [kind, []]));
    bars.sort((a, b) => a.start - b.start);
    for (const bar of bars) { // use the first free lane of the stage
      const free = lanes.get(bar.stage.stage);
      let lane = free.findIndex((end) => end <= bar.start);
      if (lane < 0) lane = free.push(0) - 1;
      free[lane] = bar.end;
      bar.lane = lane;
    }
    const used = kinds.filter((kind) => lanes.get(kind).length);
    const rows = used.flatMap((kind) => lanes.get(kind).map((_, lane) => `${kind} ${lane}`));
    const outcomes = { succeeded: "succeeded", stopped: "served or stopped", failed: "failed", null: "running", interrupted: "interrupted" };
    const domain = ["succeeded", "served or stopped", "failed", "interrupted", "running"];
    const values = bars.map((bar) => {
      const made = bar.stage.provenance;
      const cores = bar.outcome === "succeeded" && made.cpu_s !== undefined && made.duration_s > 0 ? `\n${(made.cpu_s / made.duration_s).toFixed(1)} cores busy` : "";
      const outcome = outcomes[bar.outcome] ?? bar.outcome;
      return { row: `${bar.stage.stage} ${bar.lane}`, start: bar.start, end: Math.max(bar.end, bar.start), outcome,
        text: `${bar.stage.stage} · ${bar.stage.name}\n${outcome}, ${seconds(bar.end - bar.start)} from ${seconds(bar.start)}${cores}${bar.stage.gpus.length ? `\nGPUs ${bar.stage.gpus.join(", ")}` : ""}` };
    });
    const x = { field: "start", type: "quantitative", title: null, axis: { labels: true, grid: true }, scale: { nice: false, domain: [0, Math.max(...bars.map((bar) => bar.end))] } };
    const present = domain.filter((outcome) => values.some((value) => value.outcome === outcome));
    const colors = { succeeded: "var(--s1)", "served or stopped": "var(--s8)", failed: "var(--bad)", interrupted: "var(--s5)", running: "var(--s6)" };
    const margin = { minExtent: 90, maxExtent: 90 }; // stacked plots share their time axis
    plot("gantt", `Timeline of ${counted(bars.length, "attempt")} in ${seconds(x.scale.domain[1])}; the table below summarizes them by stage.`, {
      height: Math.max(60, Math.min(18 * rows.length, 420)), data: { values },
      mark: { type: "bar", stroke: "var(--back)", strokeWidth: 0.5 },
      encoding: {
        x, x2: { field: "end" }, tooltip: { field: "text" },
        y: { field: "row", type: "nominal", title: "stage", scale: { domain: rows }, axis: { ...margin, labelExpr: "slice(datum.label, -2) == ' 0' ? slice(datum.label, 0, -2) : ''", ticks: false, labelOverlap: false } },
        color: { field: "outcome", type: "nominal", scale: { domain: present, range: present.map((outcome) => colors[outcome]) } },
      },
    });
    for (const [id, title] of [["cpus", "CPU slots"], ["gpus", "GPUs"]]) {
      const steps = held(bars, id);
      const last = id === "gpus" || !held(bars, "gpus").length;
      $(id).hidden = !window.vegaEmbed || !steps.length;
      plot(id, `${title} held by stage runs over time, at most ${Math.max(0, ...steps.map((step) => step.n))}.`, {
        height: 70, data: { values: steps }, mark: { type: "area", interpolate: "step-after", opacity: 0.6, color: "var(--s3)", line: { color: "var(--s3)" } },
        encoding: { x: { ...x, field: "at", title: last ? "seconds since the run started" : null }, y: { field: "n", type: "quantitative", title, axis: { ...margin, tickMinStep: 1, tickCount: 3, format: "d" } } },
      });
    }
  }

  // The amount of a resource held by stage runs over time, with a step at each change. A server that loads while its
  // predecessor with exclusive use of the machine stops takes over the predecessor's resources.
  function held(bars, kind) {
    const alone = bars.filter((bar) => data.one_machine && bar.stage.exclusive === "machine");
    const next = new Map(alone.map((bar, place) => [bar, alone[place + 1]?.start ?? bar.end]));
    const changes = bars.flatMap((bar) => {
      const amount = bar.stage.resources[kind];
      return amount ? [[bar.start, amount], [Math.min(bar.end, next.get(bar) ?? bar.end), -amount]] : [];
    });
    const steps = new Map();
    let n = 0;
    for (const [at, change] of changes.sort((a, b) => a[0] - b[0])) steps.set(at, (n += change));
    return [...steps].map(([at, held]) => ({ at, n: held }));
  }

  // one cell's details

  function details(cell) {
    const body = [];
    const pair = (list, name, value) => { if (value !== null && value !== undefined && value !== "") list.append(make("dt", {}, name), make("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))); };
    const about = make("dl");
    pair(about, "status", cell.status);
    pair(about, "reason", cell.reason);
    pair(about, "hint", cell.hint);
    pair(about, "log", cell.log);
    for (const [name, value] of Object.entries(cell.axes)) pair(about, name, value);
    if (cell.numerics) pair(about, "numbers", `weights ${cell.numerics.weights}, activations ${cell.numerics.activations}, KV cache ${cell.numerics.kv_cache}, ${cell.numerics.made}`);
    pair(about, "highest rate", cell.highest_rate);
    if (cell.highest_concurrency) pair(about, "highest concurrency", cell.highest_concurrency);
    for (const [name, value] of Object.entries(cell.accuracy)) pair(about, name, `${value.toFixed(3)} (${cell.accuracy_total} questions)`);
    if (cell.accuracy_asked) pair(about, "questions from", cell.accuracy_asked);
    body.push(about);
    if (cell.launch) {
      const text = make("pre", { tabIndex: 0, ariaLabel: "Launch command" }, cell.launch);
      body.push(make("h3", {}, "Launch the server"), text, copying("Copy launch command", cell.launch, text));
    }
    if (cell.server) {
      const text = make("pre", { tabIndex: 0, ariaLabel: "Server command" }, cell.server);
      const box = make("details", {}, make("summary", {}, "The server's own command, with environment and ports"), text, copying("Copy server command", cell.server, text));
      body.push(box);
    }
    if (cell.levels.length) {
      const names = Object.keys(NAMES).filter((name) => cell.levels.some((level) => level[name]));
      const table = make("table", {}, make("caption", {}, "Measurements by concurrency or request rate. Latencies in ms: p50 / p90 / p99 of n requests."), make("thead"), make("tbody"));
      const goodput = cell.levels.some((level) => level.goodput !== null);
      const gpus = cell.levels.some((level) => level.gpu);
      fill(table, [["load", false], ...(goodput ? [["goodput", true]] : []), ["tok/s", true], ["repeats", true], ["input tok/s", true], ["req/s", true], ...(gpus ? [["tok/J", true], ["GPU W", true], ["GPU GB", true], ["SM MHz", true]] : []), ["window", false], ...names.map((name) => [NAMES[name], true]), ["failed", true]],
        cell.levels.map((level) => ({ values: [level.at, ...(goodput ? [level.goodput === null ? "" : level.goodput.toFixed(2)] : []), number(level.out), level.repeats.map(number).join(", "), number(level.in), number(level.req),
          ...(gpus ? [number(level.joule), number(level.gpu?.power_w), level.gpu?.memory_bytes ? number(level.gpu.memory_bytes / 1e9) : "", number(level.gpu?.sm_clock_mhz)] : []), level.window ?? "",
          ...names.map((name) => (level[name] ? `${["p50", "p90", "p99"].map((at) => number(level[name][at]) || "–").join(" / ")} of ${level[name].n ?? "?"}` : "")), level.failures === null ? "" : `${level.failures} of ${level.requests}`] })));
      body.push(make("div", { className: "scroll", role: "region", tabIndex: 0, ariaLabel: "Measurements" }, table));
      if (cell.levels.some((level) => level.triton)) body.push(triton(cell.levels));
      const sampled = cell.levels.filter((level) => level.series);
      if (sampled.length && window.vegaEmbed) {
        const choice = make("select", { id: "series-level" }, ...sampled.map((level) => make("option", { value: level.key }, level.at)));
        choice.value = sampled.at(-1).key;
        choice.addEventListener("input", () => overTime(cell));
        body.push(make("h3", {}, "Over the time of a level"), make("label", {}, "Level ", choice), make("div", { id: "series", className: "plots" }));
      }
    }
    if (cell.levels.length) {
      const under = make("dl");
      pair(under, "measured", cell.measured);
      for (const [name, value] of Object.entries(data.under[cell.under])) pair(under, name, value);
      pair(under, "load", cell.load);
      pair(under, "tokens per request", cell.tokens);
      body.push(make("h3", {}, "System and workload"), under);
    }
    if (cell.findings.length) body.push(make("h3", {}, "Notes on this measurement"), make("ul", {}, ...cell.findings.map((text) => make("li", {}, text))));
    const stages = data.runs[cell.id].map((place) => data.stages[place]);
    if (stages.length) body.push(make("h3", {}, "Stages"));
    for (const stage of stages) body.push(stageDetails(stage, pair));
    $("details-name").textContent = cell.id;
    $("details-body").replaceChildren(...body);
  }

  // Samples of the chosen level: one plot for each of queue, KV cache and power.
  function overTime(cell) {
    if (!$("series")) return;
    const { series, at } = cell.levels.find((level) => level.key === $("series-level").value);
    const names = Object.keys(series);
    $("series").replaceChildren(...names.map((_, n) => make("div", { className: "plot", id: `series-${n}` })));
    const last = Math.max(...names.flatMap((name) => series[name].map(([time]) => time)));
    names.forEach((name, n) => {
      const values = series[name].map(([time, value]) => ({ time, value }));
      plot(`series-${n}`, `${name} at ${at}, ${number(Math.min(...values.map((one) => one.value)))} to ${number(Math.max(...values.map((one) => one.value)))}.`, {
        height: 80, data: { values }, mark: { type: "line", point: values.length < 20, color: "var(--s1)" },
        encoding: {
          x: { field: "time", type: "quantitative", title: n === names.length - 1 ? "seconds since the level started" : null, scale: { domain: [0, last], nice: false } },
          y: { field: "value", type: "quantitative", title: name, axis: { tickCount: 3, minExtent: 60, maxExtent: 60 }, scale: { zero: true } },
        },
      });
    });
  }

  // Triton's own metrics: one line per model of a level, with the gauges on the first.
  function triton(levels) {
    const gauges = [["in flight: Triton", "in_flight"], ["in flight: client", "in_flight_by_client"], ["waiting", "waiting"], ["KV cache %", "kv_cache_use", 100]]
      .filter(([, name]) => levels.some((level) => (level.triton?.[name] ?? null) !== null));
    const most = (use, name, times) => (use[`${name}_max`] ?? null) === null ? "" : `, max ${number(use[`${name}_max`] * times)}`;
    const table = make("table", {}, make("caption", {}, "Triton's own metrics, including warm-up: mean milliseconds per request of a model over the whole level."), make("thead"), make("tbody"));
    fill(table, [["load", false], ["model", false], ...["requests", "whole", "queue", "input", "compute", "output"].map((head) => [head, true]), ...gauges.map(([head]) => [head, true])],
      levels.filter((level) => level.triton).flatMap((level) => {
        const models = Object.entries(level.triton.models);
        return (models.length ? models : [["", [null, null, null, null, null, null]]]).map(([model, [requests, ...times]], n) => ({ values: [level.at, model, requests ?? "", ...times.map(number),
          ...gauges.map(([, name, times = 1]) => (n || (level.triton[name] ?? null) === null ? "" : number(level.triton[name] * times) + most(level.triton, name, times)))] }));
      }));
    return make("div", { className: "scroll", role: "region", tabIndex: 0, ariaLabel: "Triton's own metrics" }, table);
  }

  function stageDetails(stage, pair) {
    const spent = stage.attempts.reduce((sum, [start, end]) => sum + end - start, 0);
    const time = stage.attempts.length ? `, ${seconds(spent)}` : stage.made_s === null ? "" : `, created in ${seconds(stage.made_s)}`;
    const box = make("details", { open: stage.ending === "failed" }, make("summary", {}, make("b", {}, stage.stage), ` ${stage.ending}${time} `, make("code", { className: "quiet" }, stage.id)));
    if (stage.message) box.append(make("p", { className: "warn message" }, stage.message + (stage.hint ? `\ntry: ${stage.hint}` : "")));
    for (const command of stage.commands) {
      const text = make("pre", { tabIndex: 0, ariaLabel: `Command of ${stage.stage}` }, command);
      box.append(text, copying("Copy", command, text));
    }
    for (const [name, text] of [["log", stage.log], ["server log", stage.server_log]]) {
      if (text === null) box.append(make("p", { className: "quiet" }, `The ${name} is omitted because all logs together are too long. Print it with: pipeline logs ${stage.id}`));
      else if (text) box.append(make("details", { open: stage.ending === "failed" }, make("summary", {}, `End of the ${name}`), make("pre", { tabIndex: 0, ariaLabel: name }, text)));
    }
    const facts = make("dl");
    pair(facts, "reason", stage.planned);
    pair(facts, "fingerprint", stage.fingerprint);
    pair(facts, "directory", stage.folder);
    pair(facts, "resources", Object.entries(stage.resources).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", "));
    pair(facts, "exclusive use", { machine: "whole machine while measuring", gpu: "its GPUs while measuring" }[stage.exclusive]);
    pair(facts, "GPUs", stage.gpus.join(", "));
    pair(facts, "files", stage.files ? `${stage.files}, ${(stage.size_bytes / 1e6).toFixed(1)} MB` : "");
    for (const [name, value] of Object.entries(stage.provenance)) pair(facts, name, name === "finished_s" ? new Date(value * 1000).toISOString() : value);
    for (const name of ["params", "files", "identity", "inputs"]) pair(facts, `key: ${name}`, stage.key[name]);
    box.append(make("details", {}, make("summary", {}, "Provenance"), facts));
    return box;
  }

  // The fragment of the address has everything that a link should keep: filters, limits, level, and the open cell.

  const FIXED = ["words", "ttft", "tpot", "e2e", "statistic", "score", "accuracy", "level", "latency", "color"];
  const controlsById = () => [...FIXED.map((id) => [id, $(id)]), ...[...document.querySelectorAll("#filters select")].map((select) => [`filter.${select.name}`, select])].filter(([, control]) => control);
  const usual = (control) => (control.options ? ([...control.options].find((option) => option.defaultSelected) ?? control.options[0])?.value ?? "" : control.defaultValue);

  function written(cell) {
    const state = new URLSearchParams(controlsById().filter(([, control]) => control.value !== usual(control)).map(([id, control]) => [id, control.value]));
    if (cell) state.set("cell", cell);
    return `${state}`;
  }

  function remember(cell = new URLSearchParams(location.hash.slice(1)).get("cell")) {
    const state = written(cell);
    if (location.hash.includes("=") || state) history.replaceState(null, "", location.pathname + location.search + (state ? `#${state}` : ""));
  }

  function recall() {
    if (!location.hash.includes("=")) return;
    const state = new URLSearchParams(location.hash.slice(1));
    for (const [id, control] of controlsById()) if (state.has(id)) control.value = state.get(id);
  }

  function followHash() {
    if (!location.hash.includes("=")) return;
    const id = new URLSearchParams(location.hash.slice(1)).get("cell");
    const cell = cells.find((one) => one.id === id);
    if (!cell) return;
    remember(id);
    details(cell);
    if (!$("details").open) $("details").showModal();
    overTime(cell);
    $("details").scrollTop = 0;
  }

  // everything

  function show() {
    const shown = filtered();
    const all = points(shown);
    const good = take(shown, all);
    const inOrder = showTable(shown, good);
    const holding = limited() ? `, ${good.length} meet the SLOs` : "";
    remember();
    $("summary").textContent = `${shown.length} of ${counted(cells.length, "cell")}, ${counted(all.length, "measured point")}${holding}.`;
    pareto(all);
    curves(inOrder);
    precision(shown);
  }

  function controls() {
    const axes = unique(cells.flatMap((cell) => Object.keys(cell.axes)));
    const varying = axes.map((axis) => [axis, unique(cells.map((cell) => String(cell.axes[axis])))]).filter(([, values]) => values.length > 1);
    const select = (name, values) => make("select", { name }, make("option", { value: "" }, "any"), ...values.map((value) => make("option", { value }, value)));
    for (const [axis, values] of varying) if (values.length <= 60) $("filters").append(make("label", {}, axis.replaceAll("_", " "), " ", select(axis, values)));
    const statuses = unique(cells.map((cell) => cell.status));
    if (statuses.length > 1) $("filters").append(make("label", {}, "status ", select("status", statuses)));
    const colors = varying.filter(([, values]) => values.length <= COLORS.length).map(([axis]) => axis);
    $("color").append(...colors.map((axis) => make("option", { value: axis, defaultSelected: axis === "precision" }, axis.replaceAll("_", " "))), make("option", { value: "" }, "none"));
    const scores = unique(cells.flatMap((cell) => Object.keys(cell.accuracy)));
    $("score").append(...scores.map((name) => make("option", { value: name }, name)));
    document.querySelector("#controls .accuracy").hidden = !scores.length;
    for (const [id, value] of [...Object.entries(LIMITS).map(([name, id]) => [id, data.limits[name]]), ["statistic", data.limits.statistic]]) {
      if (value === undefined) continue;
      $(id).value = value;
      if (id === "statistic") [...$(id).options].forEach((option) => { option.defaultSelected = option.value === value; });
      else $(id).defaultValue = value;
    }
    const later = soon(show);
    $("controls").addEventListener("input", later);
    $("controls").addEventListener("reset", () => setTimeout(show));
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("latency").addEventListener("input", later);
    $("level")?.addEventListener("input", () => { showLevel(); remember(); });
    $("color").addEventListener("input", later);
  }

  async function start() {
    if (!window.DecompressionStream) {
      document.querySelector("header").append(make("p", { className: "warn" }, "This browser is too old for plots and details: it lacks DecompressionStream."));
      return;
    }
    data = JSON.parse(await unpack("data"));
    const rows = [...$("cells-table").tBodies[0].rows];
    cells = data.cells.map((cell, n) => ({ ...cell, levels: cell.levels.map(whole), row: rows[n], text: `${cell.id} ${cell.status} ${cell.axes.toolchain ?? ""}`.toLowerCase() }));
    palette = new Map(unique(cells.map((cell) => String(cell.axes.precision))).sort(numeric).map((kind, n) => [kind, n % COLORS.length]));
    for (const cell of cells) {
      cell.row.cells[0].querySelector("a").replaceChildren(...breakable(cell.name));
      cell.row.cells[0].prepend(make("span", { className: `dot hue ${tint(cell)}` }));
      cell.row.cells[0].querySelector(".badge")?.replaceWith(badge(cell));
    }
    const measured = cells.some((cell) => cell.levels.length);
    document.querySelectorAll(".needs-script").forEach((node) => { node.hidden = false; });
    if (measured) bestColumn();
    $("take").hidden = !measured;
    for (const id of ["pareto", "curves", "gantt", "cpus", "gpus"]) $(id).hidden = true;
    sortable();
    controls();
    recall();
    $("choices").open = matchMedia("(min-width: 64rem)").matches || limited() || Boolean(written());
    show();
    showLevel();
    addEventListener("resize", soon(fit));
    addEventListener("hashchange", () => { if (!new URLSearchParams(location.hash.slice(1)).has("cell")) { recall(); show(); showLevel(); } followHash(); });
    $("close").addEventListener("click", () => $("details").close());
    $("details").addEventListener("close", () => remember(null));
    addEventListener("beforeprint", () => { for (const cell of filtered()) cell.row.hidden = false; });
    addEventListener("afterprint", show);
    followHash();
    if ($("library")) {
      const script = make("script");
      script.textContent = await unpack("library"); // its hash is in the page's policy
      document.body.append(script);
      for (const id of ["pareto", "curves", "gantt", "cpus", "gpus"]) $(id).hidden = false;
      show();
      timeline();
      followHash(); // plots of an open cell
    }
    document.documentElement.dataset.ready = "";
  }

  start();
})();
