"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const once = new Map(); // promises of what is unpacked
  const read = new Map(); // the data of sections, once they are
  const { figures, heights, colour, guessed, needed, paint, fitted, shrink } = Charts;

  const bytesOf = (id) => Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const unpack = (id) => new Response(new Blob([bytesOf(id)]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const keep = (section, text) => (read.has(section) || read.set(section, JSON.parse(text)), read.get(section));
  function run(source) {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = source();
    document.head.append(script);
  }
  function data(section) {
    const id = "data-" + section;
    if (!once.has(id)) once.set(id, unpack(id).then((text) => keep(section, text)));
    return once.get(id);
  }
  function plotly() {
    if (!once.has("plotly")) once.set("plotly", unpack("plotly").then((source) => run(() => source)));
    return once.get("plotly");
  }

  async function draw(place) {
    const [found] = await Promise.all([data(place.dataset.section), plotly()]);
    if (figures.has(place)) return;
    figures.set(place, found.charts[Number(place.dataset.number)]);
    await fitted(place);
  }

  // Charts are drawn when they come near the screen
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  all(".chart").forEach((place) => watcher.observe(place));
  function forget(place) {
    if (!figures.delete(place)) return;
    heights.delete(place);
    Plotly.purge(place);
    place.classList.remove("drawn");
    watcher.observe(place);
  }

  Charts.offerThemes(document.getElementById("theme"));

  // Filters and order of the overview
  const claims = document.getElementById("claims");
  const filters = all("[data-filter]");
  const RUNS = document.querySelector("[data-filter=run] option:nth-child(2)")?.value; // those that the totals count
  const fits = (row, { dataset: { filter: name }, value }) =>
    !value || (name === "words" ? row.textContent.replaceAll("\u00a0", " ").toLowerCase().includes(value.trim().toLowerCase()) : row.dataset[name] === value);
  function filter() {
    const rows = all("#claims tbody tr");
    for (const row of rows) row.hidden = !filters.every((one) => fits(row, one));
    const left = rows.filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = left === rows.length ? `${left} claims` : `${left} of ${rows.length} claims`;
  }
  filters.forEach((one) => one.addEventListener("input", filter));
  all(".count").forEach((one) => one.addEventListener("click", () => {
    const asked = { verdict: one.dataset.only, whose: one.dataset.whose, run: RUNS };
    filters.forEach((each) => (each.value = asked[each.dataset.filter] || ""));
    filter();
    claims.open = true;
    claims.scrollIntoView();
    claims.querySelector("summary").focus({ preventScroll: true });
  }));
  function sort(head) {
    const table = head.closest("table"), column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    all("thead th", table).forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const text = (row) => row.cells[column].textContent.trim();
    const number = (row) => parseFloat(text(row).replace("\u2212", "-").replaceAll(",", "")); // NaN of what begins with none
    const order = all("tbody tr", table).sort(
      (a, b) => number(a) - number(b) || text(a).localeCompare(text(b), "en", { numeric: true }),
    );
    table.tBodies[0].append(...(up ? order : order.reverse()));
  }
  all(".sort").forEach((one) => one.addEventListener("click", () => sort(one.closest("th"))));

  // Downloads
  // {"number": "nan"} stands for what JSON cannot hold: a word in CSV, null in JSON
  const special = (value) => value && typeof value === "object" && "number" in value;
  const finite = (value) => (special(value) ? null : Array.isArray(value) ? value.map(finite) : value);
  function csvCell(value) {
    const plain = special(value) ? value.number : finite(value);
    const text = plain === null || plain === undefined ? "" : typeof plain === "object" ? JSON.stringify(plain) : String(plain);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }
  function asCsv({ columns, rows }) {
    return [columns, ...rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  }
  function asJson({ columns, rows }) {
    const records = rows.map((row) => Object.fromEntries(columns.map((name, place) => [name, finite(row[place])])));
    return JSON.stringify(records, null, 1);
  }
  async function download({ section, kind, file }) {
    const { columns, values } = (await data(section)).rows;
    const rows = { columns, rows: values[0].map((_, place) => values.map((column) => column[place])) };
    const blob = kind === "csv" ? new Blob([asCsv(rows)], { type: "text/csv" }) : new Blob([asJson(rows)], { type: "application/json" });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${file}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  all(".download").forEach((one) => one.addEventListener("click", () => download(one.dataset)));

  // Pictures of a chart, on the paper of the theme
  async function picture({ chart, kind, file }) {
    const place = document.getElementById(chart);
    await draw(place);
    const paper = colour("@paper"), { data, layout } = place, { width, height } = place._fullLayout;
    const shown = { data, layout: { ...layout, paper_bgcolor: paper, plot_bgcolor: paper } };
    await Plotly.downloadImage(shown, { format: kind, width, height, scale: kind === "png" ? 2 : 1, filename: file });
  }
  all(".image").forEach((one) => one.addEventListener("click", () => picture(one.dataset)));

  // The numbers of a chart, made when they are asked for
  const MOST = 400;
  const plain = (text) => typeof text === "string" ? text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&") : text;
  function tableOf({ data: [first, ...more], layout }) {
    const axes = layout.scene || layout, [across, up] = [axes.xaxis, axes.yaxis].map((axis) => plain(axis.title.text));
    const maps = [first, ...more].filter((trace) => trace?.z); // the numbers of a map with logarithmic colours are customdata
    if (maps.length) return {
      header: [`${up} \\ ${across}`, ...first.x.map(plain)],
      rows: maps.flatMap(({ name, y, z, customdata }) => (customdata ?? z).map((line, place) =>
        [plain(y[place]) + (name ? `, ${plain(name)}` : ""), ...line])),
    };
    const shown = [first, ...more].filter((trace) => trace && trace.showlegend !== false);
    return {
      header: ["series", across, up, "±"],
      rows: shown.flatMap(({ name, meta, x, y, customdata }) => x.map((at, place) =>
        [plain(name) + (meta ? ` (${meta})` : ""), plain(at), y[place], customdata?.[place] ?? null])),
    };
  }
  async function fill(details) {
    const place = document.getElementById(details.dataset.chart);
    const table = tableOf((await data(place.dataset.section)).charts[Number(place.dataset.number)]);
    const frame = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Data");
    const grid = frame.appendChild(document.createElement("table"));
    const line = (parent, cells, kind) => {
      const row = parent.insertRow();
      cells.forEach((cell, place) => {
        const node = row.appendChild(document.createElement(kind || (place ? "td" : "th")));
        if (node.tagName === "TH") node.scope = kind ? "col" : "row";
        node.textContent = cell === null ? "" : String(cell);
        if (typeof cell === "number") node.className = "num";
      });
    };
    line(grid.createTHead(), table.header, "th");
    const body = grid.createTBody();
    table.rows.slice(0, MOST).forEach((row) => line(body, row));
    details.append(frame);
    if (table.rows.length > MOST) {
      const rest = details.appendChild(document.createElement("p"));
      rest.textContent = `The first ${MOST} of ${table.rows.length} lines.`;
    }
  }
  all("details.data").forEach((one) => one.addEventListener("toggle", () => {
    if (one.open && one.childElementCount === 1) fill(one);
  }));

  all(".copy").forEach((one) => one.addEventListener("click", async () => {
    const source = one.previousElementSibling;
    try {
      await navigator.clipboard.writeText(source.textContent);
      one.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source); // for the reader's own keys
      one.textContent = "Selected";
    }
    setTimeout(() => (one.textContent = "Copy"), 2000);
  }));

  // Sections open by their titles, by links to them, and all at once
  const sections = all("main > section > details");
  function reach() {
    const found = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const part = found && (found.querySelector(":scope > details.part") || found.closest("details.part"));
    if (!part || part.open) return;
    part.open = true;
    found.scrollIntoView();
  }
  addEventListener("hashchange", reach);
  document.addEventListener("click", (event) => {
    if (event.target.closest?.('a[href^="#"]')?.hash === location.hash) reach(); // the address does not change
  });
  const unfold = document.getElementById("unfold");
  const label = () => unfold && (unfold.textContent = sections.every((one) => one.open) ? "Close all sections" : "Open all sections");
  unfold?.addEventListener("click", () => {
    const open = !sections.every((one) => one.open);
    sections.forEach((one) => (one.open = open));
  });
  sections.forEach((one) => one.addEventListener("toggle", () => {
    if (!one.open) all(".chart", one).forEach(forget);
    label();
  }));
  label();
  reach();

  // Where the reader is
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const spy = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  all("main > section").forEach((section) => spy.observe(section));

  // Paper: light, one column, all claims, and of open sections all charts and the configuration; a chart that was not drawn before is drawn now
  let before = null;
  const WIDTH = 640, PAPER = 700;
  // One table that is wider than the paper would make every page smaller: its letters are smaller instead
  function fitTables() {
    root.classList.add("measured");
    const tables = all("details[open] .scroll > table").map((table) => [table, PAPER / table.offsetWidth]);
    root.classList.remove("measured");
    for (const [table, scale] of tables) table.style.fontSize = scale < 1 ? `${0.8 * scale}rem` : "";
  }
  plotly().then(() => all(".chart").forEach((place) => data(place.dataset.section)));
  function drawnAtOnce(place) {
    Plotly.purge(place); // a new drawing is done at once, a change of one not
    paint(place, { width: WIDTH, autosize: false });
  }
  addEventListener("beforeprint", () => {
    const told = [...(claims ? [claims] : []), ...all("details[open] > .facts, .how > .facts, .more")].filter((one) => !one.open);
    before = { theme: root.dataset.theme, told };
    root.dataset.theme = "light";
    shrink(0.8);
    for (const one of told) one.open = true;
    fitTables();
    const charts = all("details[open] .chart");
    if (charts.length) run(() => inflate(bytesOf("plotly")));
    for (const place of charts) {
      const { section, number } = place.dataset;
      const found = read.get(section) || keep(section, inflate(bytesOf("data-" + section)));
      if (!figures.has(place)) figures.set(place, found.charts[Number(number)]);
      heights.set(place, guessed(place, WIDTH));
      drawnAtOnce(place);
      const more = needed(place);
      if (more <= heights.get(place)) continue; // a drawing takes long, some empty lines do not
      heights.set(place, more);
      drawnAtOnce(place);
    }
  });
  addEventListener("afterprint", () => {
    before.theme === undefined ? delete root.dataset.theme : (root.dataset.theme = before.theme);
    shrink(1);
    for (const one of before.told) one.open = false;
    all(".scroll > table").forEach((table) => (table.style.fontSize = ""));
    all("details[open] .chart").forEach(forget); // those near the screen are drawn again
  });
})();
