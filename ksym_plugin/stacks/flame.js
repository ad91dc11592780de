"use strict";
// Zoom, search and tooltips of one flame graph. Everything that came from a profile is
// set as text, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg", HTML = "http://www.w3.org/1999/xhtml";
  const script = document.currentScript;
  const svg = script ? script.closest("svg") : document.documentElement;
  const data = JSON.parse(svg.querySelector("metadata").textContent);
  const { pad, row, top, names, short, kinds, notes, boxes, inverted, levels } = data;
  const labels = svg.querySelector(".labels"), rects = [...svg.querySelector(".frames").children];
  const FIELDS = 5; // depth, start, total, own, name
  const depthOf = i => boxes[FIELDS * i], startOf = i => boxes[FIELDS * i + 1];
  const totalOf = i => boxes[FIELDS * i + 2], ownOf = i => boxes[FIELDS * i + 3];
  const nameOf = i => boxes[FIELDS * i + 4];
  const end = i => startOf(i) + totalOf(i);
  // Counts with decimals do not add up to the last digit.
  const slack = totalOf(0) * 1e-9, within = (i, j) => startOf(i) >= startOf(j) && end(i) <= end(j) + slack;
  const alone = svg === document.documentElement;
  let focus = 0, width = data.width, shown = -1;

  const make = (space, tag, attributes, parent) => {
    const element = document.createElementNS(space, tag);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (parent) parent.append(element);
    return element;
  };
  const percent = (part, whole) => (whole ? 100 * part / whole : 0).toFixed(2) + " %";
  const y = i => top + row * (inverted ? depthOf(i) : levels - 1 - depthOf(i));

  // How many columns of the fixed-width font a character takes.
  const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]|[^\0-\uffff]/;
  const column = (() => {
    const probe = make(SVG, "text", {}, labels);
    probe.textContent = "m".repeat(100);
    const measured = probe.getComputedTextLength() / 100;
    probe.remove();
    return measured || data.column;
  })();
  const cut = (name, room) => {
    if (room < 3) return "";
    let used = 0, text = "";
    for (const character of name) {
      used += WIDE.test(character) ? 2 : 1;
      if (used > room) return [...text].slice(0, -1).join("") + "…";
      text += character;
    }
    return text;
  };

  const place = (i, x, wide) => {
    const rect = rects[i];
    rect.setAttribute("x", x.toFixed(2));
    rect.setAttribute("width", Math.max(0, wide > 3 ? wide - 0.5 : wide).toFixed(2));
    rect.removeAttribute("display");
    const text = cut(short[nameOf(i)] || names[nameOf(i)], Math.floor((wide - 8) / column));
    if (!text) return;
    make(SVG, "text", { x: (x + 4).toFixed(2), y: y(i) + row - 6 }, labels).textContent = text;
  };
  const draw = () => {
    labels.replaceChildren();
    const scale = (width - 2 * pad) / totalOf(focus);
    for (let i = 0; i < rects.length; i++) {
      const below = depthOf(i) < depthOf(focus);
      rects[i].classList.toggle("past", below);
      if (below && within(focus, i)) {
        place(i, pad, width - 2 * pad);
      } else if (!below && within(i, focus) && totalOf(i) * scale >= data.least) {
        place(i, pad + (startOf(i) - startOf(focus)) * scale, totalOf(i) * scale);
      } else {
        rects[i].setAttribute("display", "none");
      }
    }
    reset.hidden = focus === 0;
  };
  const zoom = i => { focus = i; hide(); draw(); };

  // Search: a regular expression, over names as they are shown; without capitals in it
  // capitals do not matter. A stack counts once, however many of its frames match.
  const search = () => {
    const wanted = input.value;
    let pattern = null;
    input.classList.remove("bad");
    try {
      pattern = wanted && new RegExp(wanted, wanted === wanted.toLowerCase() ? "i" : "");
    } catch (error) {
      input.classList.add("bad");
    }
    const hits = names.map(name => Boolean(pattern) && pattern.test(name));
    let matched = 0, covered = -1;
    for (let i = 0; i < rects.length; i++) {
      const hit = hits[nameOf(i)];
      rects[i].classList.toggle("hit", hit);
      if (hit && startOf(i) >= covered - slack) {
        matched += totalOf(i);
        covered = end(i);
      }
    }
    svg.classList.toggle("searching", Boolean(pattern));
    // Frames that are not drawn cannot be searched.
    const bound = data.hidden ? "at least " : "";
    found.textContent = pattern ? bound + percent(matched, totalOf(0)) + " matched" : "";
  };
  const clear = () => { input.value = ""; search(); input.blur(); };

  // The toolbar and the tooltip are HTML: they wrap and take input.
  const bar = make(SVG, "foreignObject", { y: 10, width: 480, height: 30 }, svg);
  const tools = make(HTML, "div", { class: "tools" }, bar);
  const found = make(HTML, "span", { class: "found" }, tools);
  const reset = make(HTML, "button", { type: "button", class: "reset" }, tools);
  const input = make(HTML, "input", { type: "text", placeholder: "Search (Ctrl-F)",
    spellcheck: "false", "aria-label": "Search, a regular expression" }, tools);
  reset.textContent = "Reset zoom";
  const over = make(SVG, "foreignObject", { class: "over", width: 1, height: 1, display: "none" }, svg);
  const tip = make(HTML, "div", { class: "tip" }, over);

  const describe = i => {
    tip.replaceChildren();
    make(HTML, "b", {}, tip).textContent = names[nameOf(i)];
    const parts = [data.kindNames[kinds[nameOf(i)]],
      totalOf(i).toLocaleString("en") + " " + data.unit + ", " + percent(totalOf(i), totalOf(0)),
      "own " + ownOf(i).toLocaleString("en") + ", " + percent(ownOf(i), totalOf(0))];
    if (focus) parts.push(percent(totalOf(i), totalOf(focus)) + " of the view");
    tip.append(...[parts.join(" · "), ...(notes[nameOf(i)] || [])].join("\n"));
  };
  const show = (i, event) => {
    if (shown !== i) { describe(i); shown = i; }
    over.removeAttribute("display");
    const frame = svg.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const x = event.clientX - frame.left, right = frame.width - size.width - 4;
    const under = event.clientY + 18 + size.height < window.innerHeight;
    over.setAttribute("x", Math.max(4, Math.min(x + 12, right)));
    over.setAttribute("y", event.clientY - frame.top + (under ? 18 : -size.height - 10));
  };
  const hide = () => { shown = -1; over.setAttribute("display", "none"); };

  // What is lower than the window is made as high: a tooltip needs the room.
  const fit = () => {
    width = data.fixed || Math.max(640, document.documentElement.clientWidth || data.width);
    const height = alone ? Math.max(data.height, window.innerHeight) : data.height;
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    bar.setAttribute("x", width - pad - 480);
    draw();
  };
  // A picture that is a document of its own shows first what its stacks stand on.
  const follow = () => bar.setAttribute("y", 10 + Math.max(0, window.scrollY));
  rects.forEach((rect, i) => { rect.index = i; });
  const frames = svg.querySelector(".frames");
  frames.addEventListener("click", event => zoom(event.target.index || 0));
  frames.addEventListener("mousemove", event => {
    if (event.target.index === undefined) hide(); else show(event.target.index, event);
  });
  frames.addEventListener("mouseleave", hide);
  reset.addEventListener("click", () => zoom(0));
  input.addEventListener("input", search);
  window.addEventListener("resize", fit);
  window.addEventListener("keydown", event => {
    if ((event.ctrlKey || event.metaKey) && event.key === "f") {
      event.preventDefault();
      input.focus();
      input.select();
    } else if (event.key === "Escape") {
      if (input.value) clear(); else zoom(0);
    }
  });
  fit();
  if (alone) {
    window.addEventListener("scroll", follow);
    if (!inverted) window.scrollTo(0, data.height);
    follow();
  }
})();
