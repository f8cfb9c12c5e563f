"use strict";
(() => {
  const all = document.querySelector(".lanes");
  if (!all) return;
  const units = +all.dataset.units, seconds = +all.dataset.seconds;
  const charts = [...all.querySelectorAll(".lane svg")], axes = [...all.querySelectorAll(".axis")];
  const tools = document.querySelector(".tools"), tip = document.createElement("div");
  let from = 0, to = units, pressed = null, brush = null;
  tip.className = "tip"; tip.hidden = true; document.body.append(tip);

  const time = (at) => {
    const value = Math.abs(at), [size, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return +(at / size).toPrecision(5) + " " + unit;
  };
  const show = (low, high) => {
    const width = Math.min(units, Math.max(units / 2000, high - low));
    from = Math.min(Math.max(0, low), units - width); to = from + width;
    for (const chart of charts) chart.setAttribute("viewBox", `${from} 0 ${to - from} 10`);
    for (const axis of axes) {
      const marks = [...axis.children];
      marks.forEach((mark, index) => {
        mark.textContent = time((from + (to - from) * index / (marks.length - 1)) / units * seconds);
      });
    }
  };
  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.type = "button"; made.textContent = text; made.title = label; made.setAttribute("aria-label", label);
    made.onclick = act; tools.append(made);
  };
  const zoom = (factor) => { const middle = (from + to) / 2, half = (to - from) / 2 * factor; show(middle - half, middle + half); };
  const move = (part) => { const width = (to - from) * part; show(from + width, to + width); };
  button("+", "zoom in", () => zoom(0.5)); button("−", "zoom out", () => zoom(2));
  button("←", "earlier", () => move(-0.5)); button("→", "later", () => move(0.5));
  button("whole window", "show the whole window", () => show(0, units));

  const place = (chart, event) => {
    const box = chart.getBoundingClientRect();
    return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const spanAt = (chart, at) => {
    let best = null;
    for (const path of chart.querySelectorAll("path")) {
      path.spans ??= [...path.getAttribute("d").matchAll(/M(\d+) 5h(\d+)/g)].map((found) => [+found[1], +found[2]]);
      for (const [start, length] of path.spans)
        if (start <= at && at <= start + length && (!best || length < best.length))
          best = { name: path.dataset.name, start, length };
    }
    return best;
  };
  for (const chart of charts) {
    for (const path of chart.querySelectorAll("path")) {
      const title = path.querySelector("title");
      path.dataset.name = title.dataset.name ?? title.textContent; title.remove();
    }
    chart.addEventListener("pointermove", (event) => {
      const found = spanAt(chart, place(chart, event)), scale = seconds / units;
      tip.hidden = !found;
      if (found) {
        const begin = found.start * scale, length = found.length * scale;
        tip.textContent = `${found.name}: ${time(begin)} to ${time(begin + length)}, ${time(length)}`;
        tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
        tip.style.top = event.clientY + 16 + "px";
      }
    });
    chart.addEventListener("pointerleave", () => { tip.hidden = true; });
    chart.addEventListener("dblclick", () => show(0, units));
    chart.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      pressed = { chart, x: event.clientX, at: place(chart, event) };
      brush = document.createElement("div"); brush.className = "brush"; all.append(brush);
    });
  }
  addEventListener("pointermove", (event) => {
    if (!pressed) return;
    const box = pressed.chart.getBoundingClientRect(), edge = all.getBoundingClientRect().left;
    const x = Math.min(box.right, Math.max(box.left, event.clientX));
    brush.style.left = Math.min(x, pressed.x) - edge + "px"; brush.style.width = Math.abs(x - pressed.x) + "px";
  });
  addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const { chart, x, at } = pressed, end = place(chart, event);
    pressed = null; brush.remove();
    if (Math.abs(event.clientX - x) > 4) show(Math.min(at, end), Math.max(at, end));
  });
})();
