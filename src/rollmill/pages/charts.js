"use strict";
const makeReadable = (() => {
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; document.body.append(tip);
  const text = (value) => {
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= size) return +(value / size).toPrecision(4) + unit;
    return String(+value.toPrecision(4));
  };
  const nearest = (values, at) => {
    let best = 0;
    values.forEach((value, index) => { if (Math.abs(value - at) < Math.abs(values[best] - at)) best = index; });
    return best;
  };
  return (part) => { for (const chart of part.querySelectorAll(".chart")) {
    const data = JSON.parse(chart.dataset.lines), plot = chart.querySelector(".plot");
    const rule = document.createElement("div");
    rule.className = "rule"; rule.hidden = true; plot.append(rule);
    let share = 1;
    const hide = () => { rule.hidden = tip.hidden = true; };
    const show = (top) => {
      const box = plot.getBoundingClientRect(), at = data.x[0] + (data.x[1] - data.x[0]) * share;
      rule.hidden = tip.hidden = false;
      rule.style.left = share * 100 + "%";
      tip.replaceChildren();
      const head = document.createElement("div");
      head.textContent = `${text(at)} ${data.across}`; tip.append(head);
      for (const line of data.lines) {
        const index = nearest(line.x, at), row = document.createElement("div"), mark = document.createElement("i");
        if (line.y[index] === null || at < line.x[0] || at > line.x[line.x.length - 1]) continue;
        mark.style.background = `var(--${line.colour})`;
        const range = line.low[index] < line.high[index] ? ` (${text(line.low[index])} to ${text(line.high[index])})` : "";
        row.append(mark, `${line.label}: ${text(line.y[index])}${range}`); tip.append(row);
      }
      const x = box.left + share * box.width, width = tip.offsetWidth;
      const left = x + 14 + width <= innerWidth - 8 ? x + 14 : x - 14 - width;
      tip.style.left = Math.max(8, Math.min(left, innerWidth - width - 8)) + "px";
      const below = innerWidth < 640 ? box.bottom + 8 : top; // on a narrow screen it would hide the lines
      tip.style.top = Math.max(8, Math.min(below, innerHeight - tip.offsetHeight - 8)) + "px";
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(event.clientY + 16);
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      share = Math.min(1, Math.max(0, share + step));
      show(plot.getBoundingClientRect().top + 16);
    });
  } };
})();
makeReadable(document);
