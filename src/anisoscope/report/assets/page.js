"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  // A page opened from a file may be refused a memory; then choices last as long as the page.
  const remember = (store, name, value) => { try { window[store].setItem(name, value); } catch { /* as said */ } };
  const recall = (store, name) => { try { return window[store].getItem(name); } catch { return null; } };

  // Packed data: gzip in base64, unpacked once.
  const unpacked = new Map();
  const unpack = (name) => {
    if (!unpacked.has(name)) {
      const text = byId("blob-" + name).textContent;
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      unpacked.set(name, new Response(stream).text());
    }
    return unpacked.get(name);
  };
  let charts = null;
  const loadCharts = () => (charts ??= unpack("charts").then(JSON.parse));

  const column = (packed) => {
    if ("all" in packed) return () => packed.all;
    if ("of" in packed) return (row) => packed.of[packed.at[row]];
    return (row) => packed.each[row];
  };
  const rowsOf = (packed) => {
    const readers = packed.columns.map(column);
    return Array.from({ length: packed.length }, (_, row) =>
      Object.fromEntries(packed.names.map((name, place) => [name, readers[place](row)])));
  };

  // Light or dark: the system's choice until the switch is used.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme === "auto" ? system.matches : root.dataset.theme === "dark");
  const themeButton = byId("theme");
  const showTheme = () => {
    root.dataset.shade = isDark() ? "dark" : "light";
    themeButton.setAttribute("aria-pressed", String(isDark()));
    themeButton.textContent = isDark() ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", isDark() ? "Dark colours are on; switch to light" : "Switch to dark colours");
  };
  root.dataset.theme = recall("localStorage", "anisoscope-theme") ?? "auto";
  themeButton.hidden = false;
  showTheme();
  const redrawAll = () => { showTheme(); for (const place of drawn.keys()) draw(place); };
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember("localStorage", "anisoscope-theme", root.dataset.theme);
    redrawAll();
  });
  system.addEventListener("change", () => { if (root.dataset.theme === "auto") redrawAll(); });

  // Charts, each drawn when it comes near the window.
  const drawn = new Map();
  const turn = new Map();
  const panels = (spec) => ["hconcat", "vconcat", "concat", "layer"].flatMap((name) => spec[name] ?? []).concat(spec.spec ?? []);
  const across = (spec) => {
    // How wide the panels of a chart are together, without axes.
    if (spec.hconcat || spec.concat) return (spec.hconcat ?? spec.concat).reduce((sum, one) => sum + across(one), 0);
    if (spec.vconcat) return Math.max(...spec.vconcat.map(across));
    if (spec.spec) return across(spec.spec) * (spec.columns ?? 1);
    return typeof spec.width === "number" ? spec.width : 0;
  };
  const count = (spec) => (spec.hconcat ?? spec.concat ?? []).reduce((sum, one) => sum + count(one), 0)
    || (spec.vconcat ? Math.max(...spec.vconcat.map(count)) : 1);
  const stack = (spec) => {
    for (const part of panels(spec)) stack(part);
    if (spec.hconcat) { spec.vconcat = spec.hconcat; delete spec.hconcat; }
    if (spec.columns) spec.columns = 1;
  };
  const stretch = (spec, factor) => {
    for (const part of panels(spec)) stretch(part, factor);
    if (typeof spec.width === "number") spec.width = Math.round(spec.width * factor);
    if (typeof spec.height === "number" && factor > 1) spec.height = Math.round(spec.height * Math.min(factor, 1.35));
  };
  const narrow = (spec) => {
    for (const part of panels(spec)) narrow(part);
    for (const channel of Object.values(spec.encoding ?? {})) if (channel.legend?.columns) channel.legend.columns = 1;
  };
  // Panels that read their neighbour's axis mean nothing below one another.
  const leans = (spec) => panels(spec).some(leans) || spec.encoding?.y?.axis === null || spec.encoding?.y?.axis?.labels === false;
  const wrap = (line, most) => line.split(" ").reduce((lines, word) => {
    const last = lines.at(-1);
    if (last && last.length + word.length < most) lines[lines.length - 1] = last + " " + word;
    else lines.push(word);
    return lines;
  }, []);
  const fit = (spec, room) => {
    // Axes and gaps take about 75 pixels a panel. Panels that would be too small stand below one another.
    const least = 0.8;
    if (across(spec) * least + 75 * count(spec) > room && !leans(spec)) stack(spec);
    const wide = across(spec);
    if (wide) stretch(spec, Math.max(0.6, Math.min(2.1, (Math.min(room, 760) - 75 * count(spec)) / wide)));
    if (room < 480) {
      // One name a line: a legend in columns would be cut off.
      narrow(spec);
      spec.config.legend = { ...spec.config.legend, columns: 1, layout: { bottom: { anchor: "start", direction: "vertical" } } };
    }
    // The heading above the chart has its title already.
    const below = [spec.title?.subtitle ?? []].flat().flatMap((line) => wrap(line, (room - 60) / 6.2));
    delete spec.title;
    if (below.length) spec.title = { text: below, fontWeight: "normal", fontSize: 12, anchor: "start" };
  };
  const draw = async (place) => {
    const mine = (turn.get(place) ?? 0) + 1;
    turn.set(place, mine);
    try {
      const held = await loadCharts();
      const one = held.charts[Number(place.dataset.chart)];
      const spec = structuredClone(one.spec);
      spec.datasets = Object.fromEntries(one.datasets.map((name) => [name, rowsOf(held.datasets[name])]));
      spec.config = structuredClone(held.themes[isDark() ? "dark" : "light"]);
      spec.config.background = "transparent";
      delete spec.background;
      fit(spec, place.parentElement.clientWidth - 8);
      const canvas = document.createElement("div");
      if (turn.get(place) !== mine) return;
      drawn.get(place)?.finalize();
      place.replaceChildren(canvas);
      // Log level 1: errors only, not advice to whoever wrote the chart.
      const view = await window.vegaEmbed(canvas, spec, {
        ast: true, renderer: "svg", mode: "vega-lite", logLevel: 1, tooltip: { theme: isDark() ? "dark" : "light" },
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: place.closest("figure").id,
      });
      drawn.set(place, view);
      place.dataset.drawn = root.dataset.shade;
      place.style.minHeight = "";
    } catch (error) {
      place.textContent = "This chart could not be drawn: " + error.message + ". Its numbers are in the table below.";
      place.dataset.drawn = "failed";
    }
  };
  const places = [...document.querySelectorAll(".chart")];
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "300px 0px" });
  places.forEach((place) => near.observe(place));
  let settled = 0;
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      for (const place of drawn.keys()) draw(place);
    }, 250);
  });

  // Printing shows every chart, in light colours.
  const printButton = byId("print");
  printButton.hidden = false;
  printButton.addEventListener("click", async () => {
    const before = root.dataset.theme;
    root.dataset.theme = "light";
    showTheme();
    places.forEach((place) => near.unobserve(place));
    await Promise.all(places.map(draw));
    window.print();
    root.dataset.theme = before;
    redrawAll();
  });

  // Downloads.
  const quoted = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    // A spreadsheet program takes text that begins like this for a formula.
    if (typeof value === "string" && value !== "-inf" && /^[=+\-@\t\r]/.test(text)) text = "'" + text;
    return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const csvOf = (packed) => {
    const readers = packed.columns.map(column);
    const lines = [packed.names.map(quoted).join(",")];
    for (let row = 0; row < packed.length; row += 1) lines.push(readers.map((read) => quoted(read(row))).join(","));
    return lines.join("\n") + "\n";
  };
  const save = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  document.querySelectorAll("button.download").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", async () => save(csvOf(JSON.parse(await unpack(button.dataset.blob))), button.dataset.name));
  });

  // Each chart's numbers as a table, made when it is asked for.
  const cell = (kind, text) => {
    const made = document.createElement(kind);
    made.textContent = text === null || text === undefined ? "" : typeof text === "object" ? JSON.stringify(text) : String(text);
    return made;
  };
  document.querySelectorAll("details.as-table").forEach((details) => {
    details.addEventListener("toggle", async () => {
      if (!details.open || details.querySelector("table")) return;
      const packed = (await loadCharts()).datasets[details.dataset.table];
      const rows = rowsOf(packed);
      const names = packed.names.filter((_, place) => packed.columns[place].all !== null);
      const most = 400;
      const frame = document.createElement("div");
      Object.assign(frame, { className: "scroll", tabIndex: 0 });
      frame.setAttribute("role", "region");
      frame.setAttribute("aria-label", "Table: " + details.dataset.name);
      const table = frame.appendChild(document.createElement("table"));
      const head = table.createTHead().insertRow();
      for (const name of names) { const made = cell("th", name); made.scope = "col"; head.append(made); }
      const body = table.createTBody();
      for (const row of rows.slice(0, most)) body.insertRow().append(...names.map((name) => cell("td", row[name])));
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: "Download these " + rows.length.toLocaleString("en") + " rows as CSV" });
      button.addEventListener("click", () => save(csvOf(packed), details.dataset.name + ".csv"));
      details.append(frame);
      if (rows.length > most) details.append(cell("p", "The first " + most + " rows; the download has all of them."));
      details.append(button);
    });
  });

  // Where the reader is, in the contents.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  links.forEach((_, id) => { const target = byId(id); if (target) seen.observe(target); });

  // A served page asks whether the folder has changed, and comes again at the same place.
  if (root.dataset.state && location.protocol.startsWith("http")) {
    const anchors = () => [...document.querySelectorAll("main [id]")].filter((one) => one.offsetParent !== null);
    const keep = () => {
      const top = anchors().filter((one) => one.getBoundingClientRect().top <= 80).pop();
      remember("sessionStorage", "anisoscope-place", JSON.stringify({
        id: top ? top.id : "", from: top ? top.getBoundingClientRect().top : -window.scrollY,
        open: [...document.querySelectorAll("details")].map((one) => one.open), focus: document.activeElement?.id ?? "",
      }));
    };
    const kept = recall("sessionStorage", "anisoscope-place");
    if (kept) {
      try { sessionStorage.removeItem("anisoscope-place"); } catch { /* as above */ }
      history.scrollRestoration = "manual";
      const place = JSON.parse(kept);
      const all = [...document.querySelectorAll("details")];
      if (all.length === place.open.length) all.forEach((one, number) => { one.open = place.open[number]; });
      const target = place.id ? byId(place.id) : null;
      const from = target ? target.getBoundingClientRect().top + window.scrollY : 0;
      window.scrollTo({ top: from - place.from, behavior: "instant" });
      if (place.focus) byId(place.focus)?.focus({ preventScroll: true });
    }
    // A status that is set again is read aloud again.
    const live = byId("live");
    const say = (text) => { if (live.textContent !== text) live.textContent = text; };
    const ask = async () => {
      try {
        const answer = await fetch("status", { cache: "no-store" });
        const status = await answer.json();
        say(status.sentence ? "Watching the folder: " + status.sentence + "." : "Watching the folder.");
        if (status.state !== root.dataset.state) { keep(); location.reload(); return; }
      } catch {
        say("The server does not answer; this is what it last showed.");
      }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 1000);
  }
})();
