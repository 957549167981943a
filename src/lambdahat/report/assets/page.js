"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const once = new Map(); // promises of what is unpacked
  const read = new Map(); // the data of sections, once they are
  const HOVERS = matchMedia("(hover: hover)").matches; // a mouse, not a finger
  const figures = new Map(); // of drawn charts, by element

  async function unpack(id) {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  function data(section) {
    const id = "data-" + section;
    if (!once.has(id)) once.set(id, unpack(id).then((text) => {
      read.set(section, JSON.parse(text));
      return read.get(section);
    }));
    return once.get(id);
  }
  function plotly() {
    if (!once.has("plotly")) once.set("plotly", unpack("plotly").then((source) => {
      const script = document.createElement("script");
      script.textContent = source;
      document.head.append(script);
    }));
    return once.get("plotly");
  }

  // Colours: "@s0/0.2" is the theme's --s0 at that opacity
  function colour(name) {
    const [token, alpha] = name.slice(1).split("/");
    const hex = getComputedStyle(root).getPropertyValue("--" + token).trim();
    if (alpha === undefined) return hex;
    const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
    return `rgba(${parts.join(",")},${alpha})`;
  }
  function coloured(value, key) {
    if (Array.isArray(value)) return ["x", "y", "z", "customdata"].includes(key) ? value : value.map((part) => coloured(part));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, coloured(part, name)]));
    const token = typeof value === "string" && /color$/.test(key || "") && value.startsWith("@");
    return token ? colour(value) : value;
  }
  function layoutOf(place, figure, size) {
    const layout = coloured(figure.layout);
    const look = { gridcolor: colour("@rule"), linecolor: colour("@rule"), zerolinecolor: colour("@rule") };
    for (const axis of [layout.xaxis, layout.yaxis, layout.scene?.xaxis, layout.scene?.yaxis, layout.scene?.zaxis])
      if (axis) Object.assign(axis, look);
    const family = getComputedStyle(document.body).fontFamily;
    return {
      ...layout, ...size, autosize: true, uirevision: "kept", hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: !layout.scene ? 12 : place.clientWidth < 500 ? 9 : 11, color: colour("@ink") },
      margin: layout.scene ? { l: 0, r: 0, t: 0, b: 0 } : { l: 56, r: 12, t: HOVERS ? 30 : 10, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("@muted"), activecolor: colour("@accent") },
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: colour("@raised"), bordercolor: colour("@rule"), font: { color: colour("@ink"), family } },
      // a finger on a chart scrolls the page
      dragmode: layout.scene ? "orbit" : HOVERS ? "zoom" : false,
    };
  }
  const config = (flat) => ({
    responsive: true, displaylogo: false, displayModeBar: HOVERS ? "hover" : false,
    modeBarButtons: [flat ? ["toImage", "zoom2d", "pan2d", "resetScale2d"] : ["toImage", "orbitRotation", "pan3d", "resetCameraDefault3d"]],
  });
  function paint(place, size = {}) {
    const figure = figures.get(place);
    place.classList.add("drawn");
    return Plotly.react(place, coloured(figure.data), layoutOf(place, figure, size), config(!figure.layout.scene));
  }
  async function draw(place) {
    const [found] = await Promise.all([data(place.dataset.section), plotly()]);
    if (figures.has(place)) return;
    figures.set(place, found.charts[Number(place.dataset.number)]);
    place.style.height = figures.get(place).layout.height + "px";
    await paint(place);
  }

  // Charts are drawn when they come near the screen
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  all(".chart").forEach((place) => watcher.observe(place));

  // Theme
  const button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  function kept(theme) {
    try { return theme === undefined ? localStorage.getItem("theme") : localStorage.setItem("theme", theme); } catch { return null; }
  }
  function retheme() {
    button.setAttribute("aria-pressed", String(dark()));
    for (const place of figures.keys()) paint(place);
  }
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept(root.dataset.theme);
    retheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
  retheme();

  // Filters and order of the overview
  const filters = all("[data-filter]");
  function filter() {
    const rows = all("#overview tbody tr");
    for (const row of rows) row.hidden = filters.some((one) => one.value && row.dataset[one.dataset.filter] !== one.value);
    const left = rows.filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = left === rows.length ? `${left} claims` : `${left} of ${rows.length} claims`;
  }
  filters.forEach((one) => one.addEventListener("change", filter));
  function sort(head) {
    const table = head.closest("table"), column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    all("thead th", table).forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const text = (row) => row.cells[column].textContent.trim();
    const order = all("tbody tr", table).sort((a, b) => text(a).localeCompare(text(b), "en", { numeric: true }));
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
    const { rows } = await data(section);
    const blob = kind === "csv" ? new Blob([asCsv(rows)], { type: "text/csv" }) : new Blob([asJson(rows)], { type: "application/json" });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${file}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  all(".download").forEach((one) => one.addEventListener("click", () => download(one.dataset)));

  // The numbers of a chart, made when they are asked for
  const MOST = 400;
  async function fill(details) {
    const place = document.getElementById(details.dataset.chart);
    const { table } = (await data(place.dataset.section)).charts[Number(place.dataset.number)];
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
    await navigator.clipboard?.writeText(one.previousElementSibling.textContent);
    one.textContent = "Copied";
    setTimeout(() => (one.textContent = "Copy"), 2000);
  }));

  // Where the reader is
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const spy = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  all("main > section").forEach((section) => spy.observe(section));

  // Paper: light, every chart, one column; the library and the data are there soon after the page is
  let before = null;
  plotly().then(() => all(".chart").forEach((place) => data(place.dataset.section)));
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    for (const place of all(".chart")) {
      const found = read.get(place.dataset.section);
      if (!found || !window.Plotly) continue;
      if (!figures.has(place)) figures.set(place, found.charts[Number(place.dataset.number)]);
      Plotly.purge(place); // a new drawing is done at once, a change of one not
      paint(place, { width: 640, autosize: false });
    }
  });
  addEventListener("afterprint", () => {
    before === undefined ? delete root.dataset.theme : (root.dataset.theme = before);
    for (const place of figures.keys()) paint(place);
  });
})();
