(() => {
  const POLL = 2000, POLL_HIDDEN = 30000, POLL_LOST = 10000, PAGE = 100, COLOURS = 8, MAX_COMPARED = 40;
  const STATES = ["running", "finished", "stopped", "failed", "killed", "damaged"];
  const $ = (id) => document.getElementById(id);
  const rows = new Map(), sparks = new Map(), elements = new Map(), opened = new Set();
  let version = 0, varying = [], chosen = [], detail = null, states = new Set(), limit = PAGE, first = true;
  let sort = { column: "changed", down: true }, timer = 0, drawn = "", asked = 0, lastOrder = "";

  const make = (name, properties = {}, ...children) => {
    const { data = {}, ...others } = properties, element = Object.assign(document.createElement(name), others);
    Object.assign(element.dataset, data);
    element.append(...children);
    return element;
  };
  const compact = (value) => {
    for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= 0.9995 * size) return +(value / size).toPrecision(3) + unit;
    return String(+value.toPrecision(3));
  };
  const age = (time) => {
    const seconds = Math.max(0, Math.floor(Date.now() / 1000 - time));
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    return `${seconds} s ago`;
  };
  const ask = async (path, parameters) => {
    const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  // --- what is shown -------------------------------------------------------------------------------------

  const valueOf = (row, name) => {
    if (name === "env") return row.environment;
    if (name === "name" || name === "run") return row.key;
    if (name === "return" && row.return === null && Object.keys(row.returns).length) return Math.max(...Object.values(row.returns));
    if (name.startsWith("returns/")) return row.returns[name.slice(8)];
    const value = row[name];
    return value !== undefined && typeof value !== "object" ? value : row.settings[name.replaceAll("-", "_")];
  };
  const condition = (word) => {
    const parts = /^([\w./-]+)(<=|>=|=|<|>)(.+)$/.exec(word);
    if (!parts) {
      const wanted = word.toLowerCase();
      return (row) => `${row.key} ${row.algorithm} ${row.environment} ${row.state} ${row.note}`.toLowerCase().includes(wanted);
    }
    const [, name, sign, text] = parts, limit = Number(text);
    if (sign === "=") {
      const pattern = new RegExp(`^${text.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replaceAll("*", ".*")}$`, "i");
      return (row) => {
        const value = valueOf(row, name) ?? "";
        return pattern.test(String(value)) || (text !== "" && Number(value) === limit && String(value) !== "");
      };
    }
    const compare = { "<": (a) => a < limit, ">": (a) => a > limit, "<=": (a) => a <= limit, ">=": (a) => a >= limit }[sign];
    return (row) => { const value = valueOf(row, name); return value != null && value !== "" && compare(Number(value)); };
  };
  const filter = () => {
    const conditions = $("search").value.trim().split(/\s+/).filter(Boolean).map(condition);
    const algorithm = $("algorithm").value, environment = $("environment").value;
    return (row) => (!states.size || states.has(row.state)) && (!algorithm || row.algorithm === algorithm)
      && (!environment || row.environment === environment) && conditions.every((fits) => fits(row));
  };
  const key = (row) => {
    const value = valueOf(row, sort.column);
    if (value === undefined || value === null || value === "") return null;
    return Number.isFinite(Number(value)) ? Number(value) : String(value);
  };
  const compare = (one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
    return (sort.down ? -order : order) || (one.key < other.key ? -1 : 1);
  };
  const visible = () => {
    const fits = filter(), all = [...rows.values()], flat = $("flat").checked, trials = new Map();
    for (const row of all) if (row.parent !== null) trials.set(row.parent, [...(trials.get(row.parent) ?? []), row]);
    if (flat) return all.filter((row) => row.kind === "run" && fits(row)).sort(compare);
    const shown = [];
    const top = all.filter((row) => row.parent === null && (fits(row) || trials.get(row.key)?.some(fits))).sort(compare);
    for (const row of top) {
      shown.push(row);
      if (opened.has(row.key)) shown.push(...(trials.get(row.key) ?? []).filter(fits).sort(compare));
    }
    return shown;
  };

  // --- the table -----------------------------------------------------------------------------------------

  const columns = () => [
    { name: "state", title: "state", className: "status" }, { name: "key", title: "run" }, { name: "algorithm", title: "algorithm", wide: true },
    { name: "environment", title: "environment", wide: true }, { name: "return", title: "return", right: true },
    { name: "curve", title: "" }, { name: "steps", title: "steps", right: true },
    { name: "speed", title: "steps/s", right: true, wide: true }, { name: "changed", title: "changed", right: true, wide: true },
    ...varying.map((name) => ({ name, title: name, right: true, wide: true, setting: true })),
  ];
  const head = () => {
    const cells = columns().map((column) => {
      const mark = sort.column === column.name ? (sort.down ? " ↓" : " ↑") : "";
      const kind = [column.right ? "" : "left", column.wide ? "wide" : "", column.className ?? ""].join(" ");
      if (!column.title) return make("th", { className: kind });
      const button = make("button", { type: "button", textContent: column.title + mark });
      button.onclick = () => {
        sort = { column: column.name, down: sort.column === column.name ? !sort.down : column.right === true };
        render();
      };
      return make("th", { className: kind }, button);
    });
    $("runs").tHead.replaceChildren(make("tr", {}, ...cells));
  };
  const svg = (values) => {
    const space = "http://www.w3.org/2000/svg", picture = document.createElementNS(space, "svg");
    picture.setAttribute("class", "spark"); picture.setAttribute("viewBox", "0 0 100 20");
    picture.setAttribute("preserveAspectRatio", "none"); picture.setAttribute("aria-hidden", "true");
    if (values && values.length > 1) {
      const low = Math.min(...values), range = Math.max(...values) - low || 1, path = document.createElementNS(space, "path");
      const points = values.map((value, index) => `${(100 * index / (values.length - 1)).toFixed(1)} ${(20 - 20 * (value - low) / range).toFixed(1)}`);
      path.setAttribute("d", `M${points.join("L")}`); picture.append(path);
    }
    return picture;
  };
  const colour = (name) => { const at = chosen.indexOf(name); return at < 0 ? "" : `var(--${at < COLOURS ? `c${at}` : "idle"})`; };
  const nameCell = (row) => {
    const members = row.kind === "sweep" ? [...rows.values()].filter((other) => other.parent === row.key).map((other) => other.key) : [row.key];
    const all = members.length > 0 && members.every((name) => chosen.includes(name));
    const box = make("input", { type: "checkbox", checked: all, ariaLabel: `compare ${row.key}`, data: { focus: `box ${row.key}` } });
    box.onchange = () => choose(members, box.checked);
    const mark = make("span", { className: "mark" });
    mark.style.background = row.kind === "run" ? colour(row.key) : "";
    const name = row.parent !== null && !$("flat").checked ? row.key.split("/").pop() : row.key;
    const open = make("button", { type: "button", className: "open", textContent: name, data: { focus: `open ${row.key}` } });
    open.onclick = () => show(row.key);
    const cell = make("td", { className: "name" }, box, " ", mark, open);
    if (row.kind === "sweep") {
      const sign = opened.has(row.key) ? "▾" : "▸";
      const button = make("button", { type: "button", className: "trials", textContent: `${sign} ${row.finished} of ${row.trials} trials`, data: { focus: `trials ${row.key}` } });
      button.onclick = () => { if (!opened.delete(row.key)) opened.add(row.key); elements.delete(row.key); render(); };
      cell.append(button);
    }
    if (row.note) cell.append(make("span", { className: "note", textContent: row.note.slice(0, 160) }));
    return cell;
  };
  const stepsCell = (row) => {
    if (row.steps === null) return make("td");
    const cell = make("td", { textContent: compact(row.steps) });
    if (row.planned && row.state !== "finished") {
      const share = Math.min(1, row.steps / row.planned), bar = make("i");
      bar.style.width = `${100 * share}%`;
      cell.append(` (${Math.round(100 * share)}%)`, make("span", { className: "done" }, bar));
    }
    return cell;
  };
  const build = (row) => {
    const cells = [
      make("td", { className: "left" }, make("span", { className: `state ${row.state}`, textContent: row.state })), nameCell(row),
      make("td", { className: "left wide", textContent: row.algorithm }), make("td", { className: "left wide", textContent: row.environment }),
      make("td", { textContent: row.shown }), make("td", {}, svg(sparks.get(row.key)?.values)), stepsCell(row),
      make("td", { className: "wide", textContent: row.speed === null ? "" : compact(row.speed) }),
      make("td", { className: "wide age", textContent: row.changed === null ? "" : age(row.changed), data: { time: row.changed ?? "" } }),
      ...varying.map((name) => make("td", { className: "wide", textContent: row.settings[name] ?? "" })),
    ];
    const kind = [row.parent !== null && !$("flat").checked ? "trial" : "", chosen.includes(row.key) ? "chosen" : ""].join(" ").trim();
    return make("tr", { className: kind }, ...cells);
  };
  const element = (row) => {
    const kept = elements.get(row.key);
    if (kept && kept.row === row) return kept.element;
    const built = build(row);
    elements.set(row.key, { row, element: built });
    return built;
  };
  const render = () => {
    const shown = visible(), part = shown.slice(0, limit), body = $("runs").tBodies[0];
    const focused = document.activeElement?.dataset?.focus;
    head();
    const made = part.map(element);
    if (made.length !== body.children.length || made.some((row, index) => body.children[index] !== row)) body.replaceChildren(...made);
    if (focused && document.activeElement?.dataset?.focus !== focused) document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    for (const cell of body.querySelectorAll(".age")) if (cell.dataset.time) cell.textContent = age(Number(cell.dataset.time));
    $("more").hidden = shown.length <= limit;
    $("more").textContent = `show ${Math.min(PAGE, shown.length - limit)} more of ${shown.length}`;
    const runs = [...rows.values()].filter((row) => row.parent === null).length;
    $("status").textContent = `${shown.length === runs ? "" : `${shown.length} rows of `}${runs} runs and sweeps, as of ${new Date().toLocaleTimeString()}`;
    askSparks(part);
    remember();
  };
  const askSparks = async (part) => {
    const wanted = part.filter((row) => row.kind === "run" && sparks.get(row.key)?.row !== row).slice(0, PAGE);
    if (!wanted.length) return;
    for (const row of wanted) sparks.set(row.key, { row, values: sparks.get(row.key)?.values });
    try {
      const found = await ask("sparks", wanted.map((row) => ["run", row.key]));
      for (const row of wanted) {
        sparks.set(row.key, { row: sparks.get(row.key)?.row ?? row, values: found[row.key] });
        elements.get(row.key)?.element.querySelector("svg").replaceWith(svg(found[row.key]));
      }
    } catch { for (const row of wanted) sparks.delete(row.key); }
  };
  const drawStates = () => {
    const counts = new Map();
    for (const row of rows.values()) if (row.parent === null) counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
    const buttons = STATES.filter((state) => counts.has(state) || states.has(state)).map((state) => {
      const button = make("button", { type: "button", ariaPressed: String(states.has(state)), data: { focus: `state ${state}` } });
      button.append(make("span", { className: `state ${state}`, textContent: `${state} ${counts.get(state) ?? 0}` }));
      button.onclick = () => { if (!states.delete(state)) states.add(state); limit = PAGE; drawStates(); render(); };
      return button;
    });
    const focused = document.activeElement?.dataset?.focus;
    $("states").replaceChildren(...buttons);
    if (focused?.startsWith("state ")) buttons.find((button) => button.dataset.focus === focused)?.focus();
    for (const [id, title] of [["algorithm", "all algorithms"], ["environment", "all environments"]]) {
      const names = [...new Set([...rows.values()].map((row) => row[id]).filter(Boolean))].sort();
      if (names.join("\n") === $(id).dataset.names) continue;
      const value = $(id).value || $(id).dataset.wanted || "";
      $(id).dataset.names = names.join("\n");
      $(id).replaceChildren(make("option", { value: "", textContent: title }), ...names.map((name) => make("option", { value: name, textContent: name })));
      $(id).value = names.includes(value) ? value : "";
    }
  };

  // --- curves and details --------------------------------------------------------------------------------

  const choose = (names, isChosen) => {
    const before = chosen;
    chosen = isChosen ? [...new Set([...chosen, ...names])].slice(0, MAX_COMPARED) : chosen.filter((name) => !names.includes(name));
    for (const name of new Set([...before, ...chosen, ...names])) {
      elements.delete(name);
      if (rows.get(name)?.parent) elements.delete(rows.get(name).parent);
    }
    render(); drawCurves(true);
  };
  const drawCurves = async (now = false) => {
    const runs = chosen.filter((name) => rows.get(name)?.kind === "run");
    $("compare").hidden = !runs.length;
    if (!runs.length) { drawn = ""; return; }
    const settings = [["metric", $("metric").value], ["x", $("axis").value], ["smoothing", $("smoothing").value], ["group", $("group").checked ? "1" : "0"]];
    const state = JSON.stringify([settings, runs.map((name) => [name, rows.get(name).at])]);
    if (state === drawn || (!now && $("curves").matches(":hover"))) return; // a figure that is read stays
    const number = ++asked;
    drawn = state;
    try {
      const found = await ask("curves", [...settings, ...runs.map((name) => ["run", name])]);
      if (number !== asked) return;
      const folded = [...$("curves").querySelectorAll("details")].map((part) => part.open);
      $("curves").innerHTML = found.html; // the server has escaped all names in it
      $("curves").querySelectorAll("details").forEach((part, index) => { part.open = folded[index] ?? false; });
      makeReadable($("curves"));
      const names = found.metrics.includes($("metric").value) ? found.metrics : [$("metric").value, ...found.metrics], value = $("metric").value;
      if (names.join() !== $("metric").dataset.names) {
        $("metric").dataset.names = names.join();
        $("metric").replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
        $("metric").value = value;
      }
    } catch { drawn = ""; }
  };
  const show = async (name, { scroll = true } = {}) => {
    detail = name;
    remember();
    $("details").hidden = !name;
    if (!name) return;
    try {
      const found = await ask("details", [["run", name]]);
      if (detail !== name) return;
      const open = [...$("detail").querySelectorAll("details")].map((part) => part.open), same = $("detail").dataset.run === name;
      $("detail").dataset.run = name;
      $("detail").innerHTML = found.html;
      $("detail").querySelectorAll("details").forEach((part, index) => { part.open = same && open[index]; });
      makeReadable($("detail"));
      if (scroll) $("details").scrollIntoView({ block: "start" });
    } catch { $("detail").textContent = "The run is no longer there."; }
  };

  // --- from and to the server ----------------------------------------------------------------------------

  const take = (found) => {
    const anew = found.varying.join("\n") !== varying.join("\n");
    version = found.version; varying = found.varying;
    if (anew) elements.clear();
    for (const row of found.rows) rows.set(row.key, Object.assign(row, { at: found.version }));
    for (const name of found.gone) { rows.delete(name); elements.delete(name); chosen = chosen.filter((other) => other !== name); }
    $("beside").hidden = !found.files.length;
    $("files").replaceChildren(...found.files.map((file) => make("a", { href: file.url, target: "_blank", rel: "noopener", textContent: file.name })));
    if (first) {
      first = false;
      chosen = chosen.filter((name) => rows.has(name));
      if (!chosen.length) chosen = newest();
      if (detail && rows.has(detail)) show(detail, { scroll: false }); else detail = null;
    }
    drawStates(); render(); drawCurves();
    if (detail && found.rows.some((row) => row.key === detail) && !$("detail").matches(":hover")) show(detail, { scroll: false });
  };
  const newest = () => {
    const runs = [...rows.values()].filter((row) => row.kind === "run" && row.return !== null).sort((a, b) => b.changed - a.changed);
    const running = runs.filter((row) => row.state === "running").slice(0, COLOURS);
    return (running.length ? running : runs.slice(0, 3)).map((row) => row.key);
  };
  const poll = async () => {
    clearTimeout(timer);
    let wait = document.hidden ? POLL_HIDDEN : POLL;
    const began = performance.now();
    try {
      take(await ask("rows", { since: version }));
      wait = Math.max(wait, 5 * (performance.now() - began));
    } catch (error) {
      $("status").textContent = error instanceof TypeError ? "The board has ended: start it again with `rollmill board`." : error.message;
      wait = POLL_LOST;
    }
    timer = setTimeout(poll, wait);
  };
  const remember = () => {
    const kept = new URLSearchParams();
    if ($("search").value) kept.set("q", $("search").value);
    for (const state of states) kept.append("state", state);
    for (const id of ["algorithm", "environment"]) if ($(id).value) kept.set(id, $(id).value);
    if (detail) kept.set("open", detail);
    for (const name of chosen) kept.append("run", name);
    const place = `${location.pathname}#${kept}`;
    if (place !== lastOrder) { lastOrder = place; history.replaceState(null, "", place); }
  };
  const recall = () => {
    const kept = new URLSearchParams(location.hash.slice(1));
    $("search").value = kept.get("q") ?? "";
    states = new Set(kept.getAll("state")); chosen = kept.getAll("run"); detail = kept.get("open");
    for (const id of ["algorithm", "environment"]) $(id).dataset.wanted = kept.get(id) ?? "";
  };

  recall();
  for (const id of ["search", "algorithm", "environment"]) $(id).addEventListener("input", () => { limit = PAGE; render(); });
  $("flat").addEventListener("input", () => { elements.clear(); render(); });
  for (const id of ["metric", "axis", "smoothing", "group"]) $(id).addEventListener("input", () => drawCurves(true));
  $("clear").addEventListener("click", () => choose(chosen, false));
  $("close").addEventListener("click", () => show(null));
  $("more").addEventListener("click", () => { limit += PAGE; render(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll();
})();
