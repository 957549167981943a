"use strict";
(() => {
  const root = document.documentElement;
  const by = (id) => document.getElementById(id);
  const EVERY = 1000, MOST = 8, COLOURS = 8; // ms between questions, runs shown at first, colours of the theme
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const RUN = "training run";
  const sources = new Map(); // by id: { meta, version, order, charts }
  const chosen = new Set(); // ids that are drawn
  const places = new Map(); // of charts by key: { place, figure, heading, caption, dirty, near }
  const sections = new Map();

  // Small helpers
  function node(kind, properties = {}, ...children) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }
  function clock(seconds) {
    const whole = Math.round(seconds), [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
  }

  // Changes from the server
  function merge(id, { version, order, charts }) {
    const source = sources.get(id);
    source.version = version;
    source.order = order;
    for (const [key, chart] of Object.entries(charts)) {
      const old = source.charts.get(key)?.figure.data || [];
      chart.figure.data = chart.figure.data.map((trace, place) => {
        if (!trace.grow) return trace;
        const grown = { ...old[place] };
        for (const [name, more] of Object.entries(trace.grow)) grown[name] = grown[name].slice(0, trace.from).concat(more);
        return grown;
      });
      source.charts.set(key, chart);
    }
    for (const key of [...source.charts.keys()]) if (!order.includes(key)) source.charts.delete(key);
  }

  // Figures of several runs as one
  function recoloured(value, colour) {
    if (Array.isArray(value)) return value.map((part) => (typeof part === "string" ? recoloured(part, colour) : part));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, recoloured(part, colour)]));
    return typeof value === "string" ? value.replace(/^@(s\d|muted|ink)/, `@s${colour}`) : value;
  }
  const colourOf = (id) => [...sources].filter(([, one]) => one.meta.kind === RUN).findIndex(([other]) => other === id) % COLOURS;
  const COMPANION = "longdash"; // of thresholds, and what else is no curve of a run
  const dashOf = (trace) => {
    const place = /^@s(\d)/.exec(trace.line?.color || "")?.[1];
    return place === undefined ? COMPANION : DASHES[Number(place) % DASHES.length];
  };
  const isNamed = (trace) => trace.showlegend !== false;
  // One colour and one name in the legend for each run; dashes tell its curves apart
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); // plotly reads tags
  function ofRun(figure, id, run) {
    const name = escaped(run), colour = colourOf(id), first = figure.data.find(isNamed);
    return figure.data.map((trace) => {
      const made = { ...trace, legendgroup: String(id), name, showlegend: trace === first };
      for (const part of ["line", "marker", "error_y", "fillcolor"]) if (trace[part]) made[part] = recoloured(trace[part], colour);
      if (made.line && isNamed(trace)) made.line = { ...made.line, dash: dashOf(trace) };
      made.hovertemplate = trace.hovertemplate?.replace("%{fullData.name}", `${name}: ${trace.name}`);
      return made;
    });
  }
  const WORDS = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dash-dotted", [COMPANION]: "long dashes" };
  function dashes(parts) {
    const named = parts.flatMap((part) => part.figure.data.filter((trace) => isNamed(trace) && /lines/.test(trace.mode)));
    const found = [...new Set(named.map((trace) => `${WORDS[dashOf(trace)]}: ${trace.name}`))];
    return found.length > 1 ? `Lines: ${found.join(", ")}.` : "";
  }
  const isMap = (figure) => figure.data.some((trace) => trace.z);
  function overlaid(parts, alone) {
    const [{ figure }] = parts;
    const data = alone ? figure.data : parts.flatMap((part) => ofRun(part.figure, part.id, sources.get(part.id).meta.name));
    const layout = structuredClone(figure.layout), found = parts.map((part) => part.figure.layout);
    const positive = data.every((trace) => (trace.y || []).every((value) => value === null || value > 0));
    const log = found.find((one) => one.yaxis.type === "log");
    if (log && positive) layout.yaxis = structuredClone(log.yaxis);
    layout.showlegend = data.filter(isNamed).length > 1;
    return { data, layout };
  }

  // Smoothing, an exponential average without the bias of its start; the curve itself stays, pale
  function average(values, weight) {
    let sum = 0, mass = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }
  const isCurve = (trace) => trace.type === "scatter" && /lines/.test(trace.mode) && !trace.fill && !trace.error_y && !trace.customdata && trace.hoverinfo !== "skip" && trace.line?.dash !== COMPANION && trace.line?.color !== "@muted" && trace.y.length > 2;
  function smoothed(traces, weight) {
    if (!weight) return traces;
    return traces.flatMap((trace) => !isCurve(trace) ? [trace] : [
      { ...trace, opacity: 0.25, showlegend: false, hoverinfo: "skip", mode: "lines" },
      { ...trace, y: average(trace.y, weight), mode: "lines" },
    ]);
  }
  function scaled(axis, kind, values) {
    if (!kind || !axis || axis.type === "category" || axis.type === kind) return;
    for (const name of ["dtick", "tickformat", "range", "exponentformat"]) delete axis[name];
    axis.type = kind;
    const known = values.filter((value) => value !== null && value > 0), wide = Math.max(...known) / Math.min(...known);
    if (kind === "log" && known.length) Object.assign(axis, wide > 30 ? { dtick: Math.ceil(Math.log10(wide) / 8), exponentformat: "power" } : { dtick: "D2", tickformat: "~g" });
  }
  // Equal ranges for charts of one quantity, one chart for each run
  function spread(figures, way) {
    const log = figures[0].layout[`${way}axis`].type === "log", ends = [Infinity, -Infinity];
    for (const { data } of figures) for (const trace of data) {
      if (trace.yaxis === "y2") continue;
      (trace[way] || []).forEach((value, place) => {
        if (typeof value !== "number" || (log && value <= 0)) return;
        const error = way === "y" ? trace.error_y?.array?.[place] || 0 : 0;
        for (const end of log ? [value] : [value - error, value + error]) {
          ends[0] = Math.min(ends[0], log ? Math.log10(end) : end);
          ends[1] = Math.max(ends[1], log ? Math.log10(end) : end);
        }
      });
    }
    const room = 0.05 * (ends[1] - ends[0]) || 0.5;
    return ends[0] <= ends[1] ? [ends[0] - room, ends[1] + room] : null;
  }

  // What is drawn: figures by key, of the chosen sources and the settings
  function composed() {
    const weight = Number(by("smoothing").value), overlay = by("overlay").checked, shared = by("shared").checked;
    const wanted = []; // { key, section, title, caption, words, figure }
    const runs = [...chosen].filter((id) => sources.get(id)?.meta.kind === RUN).sort((a, b) => a - b);
    const keys = [...new Set(runs.flatMap((id) => sources.get(id).order))];
    for (const key of keys) {
      const parts = runs.map((id) => ({ id, chart: sources.get(id).charts.get(key) })).filter((part) => part.chart).map((part) => ({ ...part, figure: part.chart.figure }));
      if (!parts.length) continue;
      const groups = overlay && !isMap(parts[0].figure) ? [parts] : parts.map((part) => [part]);
      const made = groups.map((group) => {
        const figure = isMap(group[0].figure) ? structuredClone(group[0].figure) : overlaid(group, runs.length === 1), [{ chart, id }] = group;
        const name = groups.length > 1 ? `${chart.title}: ${sources.get(id).meta.name}` : chart.title;
        return { key: groups.length > 1 ? `${key}\n${id}` : key, section: RUN, title: name, caption: [runs.length > 1 ? dashes(group) : "", ...new Set(group.map((one) => one.chart.caption))].join(" ").trim(), words: group.map((one) => one.chart.words).join(" "), figure, quantity: key };
      });
      for (const { figure } of made) {
        if (isMap(figure)) continue;
        const all = (way) => figure.data.flatMap((trace) => trace[way] || []);
        scaled(figure.layout.yaxis, by("y-axis").value, all("y"));
        scaled(figure.layout.xaxis, by("x-axis").value, all("x"));
      }
      if (shared && made.length > 1) for (const way of ["x", "y"]) {
        const range = isMap(made[0].figure) && way === "y" ? null : spread(made.map((one) => one.figure), way);
        if (range) for (const { figure } of made) figure.layout[`${way}axis`].range = range;
      }
      for (const one of made) if (!isMap(one.figure)) one.figure.data = smoothed(one.figure.data, weight);
      wanted.push(...made);
    }
    for (const [id, source] of sources) {
      if (source.meta.kind === RUN || !chosen.has(id)) continue;
      for (const key of source.order) {
        const { title, caption, words, figure } = source.charts.get(key);
        wanted.push({ key: `${id}\n${key}`, section: `${source.meta.kind}: ${source.meta.name}`, title, caption, words, figure: structuredClone(figure) });
      }
    }
    return wanted;
  }

  // Drawing: a chart that has changed is drawn again when it is near the screen
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const found = [...places.values()].find((one) => one.place === entry.target);
      if (!found) continue;
      found.near = entry.isIntersecting;
      if (found.near && found.dirty) paint(found);
    }
  }, { rootMargin: "400px" });
  async function paint(found) {
    found.dirty = false;
    const { figures, heights, fitted, paint: repaint } = Charts, { place } = found;
    const legend = found.figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name).join("\n");
    figures.set(place, found.figure);
    if (heights.has(place) && legend === found.legend && found.width === place.clientWidth) await repaint(place);
    else await fitted(place);
    Object.assign(found, { legend, width: place.clientWidth });
    if (!found.linked) {
      found.linked = true;
      place.on("plotly_relayout", (change) => follow(found, change));
    }
  }
  // A zoom of one chart is a zoom of all over the same axis, and of one quantity over both
  let following = false;
  async function follow(found, change) {
    if (following || !by("shared").checked || found.section !== RUN) return;
    const names = Object.keys(change).filter((name) => /^[xy]axis\.(range|autorange)/.test(name));
    if (!names.length) return;
    following = true;
    for (const other of places.values()) {
      if (other === found || other.section !== RUN || !Charts.figures.has(other.place)) continue;
      if (other.figure.layout.xaxis.title.text !== found.figure.layout.xaxis.title.text) continue;
      const own = names.filter((name) => name[0] === "x" || other.quantity === found.quantity);
      if (own.length) await Plotly.relayout(other.place, Object.fromEntries(own.map((name) => [name, change[name]])));
    }
    following = false;
  }
  function sectionOf(name) {
    if (!sections.has(name)) {
      const grid = node("div", { className: "figures" });
      const heading = node("h2", { textContent: name === RUN ? "Training" : name[0].toUpperCase() + name.slice(1) });
      const section = node("section", {}, heading, grid);
      by("sections").append(section);
      sections.set(name, { section, grid });
    }
    return sections.get(name);
  }
  function show() {
    const wanted = composed(), keys = new Set(wanted.map((one) => one.key));
    for (const [key, found] of [...places]) {
      if (keys.has(key)) continue;
      watcher.unobserve(found.place);
      if (Charts.figures.delete(found.place)) Plotly.purge(found.place);
      Charts.heights.delete(found.place);
      found.frame.remove();
      places.delete(key);
    }
    for (const one of wanted) {
      if (!places.has(one.key)) {
        const place = node("div", { className: isMap(one.figure) ? "chart tall" : "chart" });
        place.setAttribute("role", "img");
        const heading = node("h4"), caption = node("p");
        const frame = node("figure", {}, node("figcaption", {}, heading), place, caption);
        places.set(one.key, { place, heading, caption, frame, near: false, dirty: true });
        sectionOf(one.section).grid.append(frame);
        watcher.observe(place);
      }
      const found = places.get(one.key), text = JSON.stringify(one.figure);
      found.heading.textContent = one.title;
      found.caption.textContent = one.caption;
      found.caption.hidden = !one.caption;
      found.place.setAttribute("aria-label", one.words);
      Object.assign(found, { section: one.section, quantity: one.quantity });
      if (text === found.text) continue;
      Object.assign(found, { text, figure: one.figure, dirty: true });
      if (found.near) paint(found);
    }
    for (const [name, { section, grid }] of [...sections]) {
      const order = wanted.filter((one) => one.section === name).map((one) => places.get(one.key).frame);
      if (order.some((frame, place) => grid.children[place] !== frame)) grid.append(...order);
      if (order.length) continue;
      section.remove();
      sections.delete(name);
    }
  }

  // Runs and their standing
  const OK = ["CONVERGED", ""], SOON = ["measuring", "waiting"];
  function standing({ state, tasks, age, rows, step, fault }) {
    const outer = tasks[0], inner = tasks[1];
    const parts = [];
    if (outer?.total) parts.push(`${outer.task} ${outer.done.toLocaleString("en")} of ${outer.total.toLocaleString("en")}`);
    if (outer?.left != null && outer.done < outer.total) parts.push(`about ${clock(outer.left)} left`);
    if (inner?.left >= 2) parts.push(`${inner.task} ${Math.round((100 * inner.done) / inner.total)} %, ${clock(inner.left)} left`);
    if (rows !== undefined) parts.push(`${rows.toLocaleString("en")} rows, step ${(step ?? 0).toLocaleString("en")}`);
    if (state !== "finished" || !parts.length) parts.push(`last change ${clock(age)} ago`);
    return { text: fault || parts.join(" · "), share: outer?.total ? outer.done / outer.total : null, state };
  }
  const badge = (state) => ["badge", state === "running" ? "running" : state.startsWith("failed") || state === "stopped" ? "failed" : "ended"].join(" ");
  function card(id) {
    const box = node("input", { type: "checkbox", checked: chosen.has(id) });
    box.addEventListener("change", () => {
      box.checked ? chosen.add(id) : chosen.delete(id);
      sources.get(id).version = 0;
      sources.get(id).item.classList.toggle("dim", !box.checked);
      show();
      ask();
    });
    const parts = { name: node("span"), badge: node("span"), bar: node("progress", { max: 1 }), line: node("p", { className: "line" }), faults: node("ul"), facts: node("dl") };
    parts.bar.setAttribute("aria-label", "Progress");
    parts.details = node("details", { open: sources.size <= 4 && innerWidth > 640 }, node("summary", { textContent: "Numbers" }), parts.facts);
    const item = node("li", {}, node("label", {}, box, parts.name, parts.badge), parts.line, parts.bar, parts.faults, parts.details);
    by("runs").append(item);
    return { item, parts };
  }
  function told(source, id) {
    const { meta, parts, item } = source, { text, share, state } = standing(meta);
    item.classList.toggle("dim", !chosen.has(id));
    item.classList.toggle("wide", meta.kind !== RUN);
    item.style.borderLeftColor = meta.kind === RUN ? `var(--s${colourOf(id)})` : "var(--rule)";
    parts.name.textContent = meta.name;
    Object.assign(parts.badge, { className: badge(state), textContent: state || meta.kind, title: meta.kind });
    parts.line.textContent = meta.kind === RUN ? text : `${meta.kind} · ${text}`;
    parts.bar.hidden = share === null;
    if (share !== null) parts.bar.value = share;
    const facts = JSON.stringify(meta.facts || []);
    if (facts === source.told) return;
    source.told = facts;
    const all = meta.facts || [], wrong = all.filter(({ status }) => !OK.includes(status) && !SOON.includes(status));
    parts.faults.replaceChildren(...wrong.map(({ label, status, remedy }) => node("li", {}, node("strong", { textContent: `${label}: ${status}` }), remedy ? ` ${remedy}` : "")));
    parts.details.hidden = !all.some(({ value, status }) => value || SOON.includes(status));
    parts.facts.replaceChildren(...all.filter(({ value, status }) => value || SOON.includes(status)).map(({ label, value, status }) =>
      node("div", {}, node("dt", { textContent: label }), node("dd", { className: value ? "" : "soon", textContent: value || status }))));
  }
  function receive({ folder, sources: found, charts }) {
    by("folder").textContent = folder;
    const fresh = [];
    for (const meta of found) {
      if (!sources.has(meta.id)) {
        sources.set(meta.id, { version: 0, order: [], charts: new Map(), meta });
        if (chosen.size < MOST) chosen.add(meta.id);
        Object.assign(sources.get(meta.id), card(meta.id));
        if (chosen.has(meta.id)) fresh.push(meta.id);
      }
      sources.get(meta.id).meta = meta;
      told(sources.get(meta.id), meta.id);
    }
    for (const [id, changes] of Object.entries(charts)) merge(Number(id), changes);
    const running = found.find((meta) => meta.state === "running" && meta.tasks[0]?.total);
    document.title = running ? `${Math.floor((100 * running.tasks[0].done) / running.tasks[0].total)} % · ${folder}` : `${folder} · live`;
    by("settings").hidden = !found.some((meta) => meta.kind === RUN);
    by("waiting").hidden = found.length > 0;
    if (!found.length) by("waiting").replaceChildren(`Nothing in ${folder} yet. This page waits for the rows of a training run, a sweep or a measurement: `, node("code", { textContent: `lambdahat train … --out ${folder}` }), " or ", node("code", { textContent: "lh.training.fit(…, folder=…)" }), ".");
    if (Object.keys(charts).length) show();
    return fresh.length > 0;
  }

  // Questions to the server, one at a time
  let timer = 0, asking = false, again = false;
  async function ask() {
    if (asking) return void (again = true);
    asking = true;
    clearTimeout(timer);
    let soon = false;
    try {
      const have = [...chosen].map((id) => `${id}:${sources.get(id).version}`).join(",");
      const answer = await fetch(`state?have=${have}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      soon = receive(await answer.json());
      by("pulse").className = "on";
      by("link").textContent = "live";
      root.dataset.polls = String(1 + Number(root.dataset.polls || 0));
    } catch (error) {
      by("pulse").className = "off";
      by("link").textContent = error instanceof TypeError ? "no answer: lambdahat watch has ended, or is busy" : `error: ${error.message}`;
      if (!(error instanceof TypeError)) console.error(error);
    }
    asking = false;
    timer = setTimeout(ask, soon || again ? 0 : EVERY);
    again = false;
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : ask()));

  // Settings
  by("smoothing").addEventListener("input", () => {
    by("weight").textContent = Number(by("smoothing").value) ? Number(by("smoothing").value).toFixed(2) : "off";
    show();
  });
  for (const id of ["y-axis", "x-axis", "overlay", "shared"]) by(id).addEventListener("change", show);

  Charts.offerThemes(by("theme"));
  ask();
})();
