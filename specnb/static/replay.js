// The replay of rounds. All steps are in the page, so stepping needs no kernel; `index` is synced when there is one.

const WRITTEN = new Set(["accepted", "correction", "bonus", "plain"]);
const PLAY_MS = 1400;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// One token: its text, its mark, and its kind in words for those who hear the page.
function chip(token, kinds) {
  const [mark, meaning] = kinds[token.kind];
  const dropped = token.kind === "rejected" || token.kind === "unused";
  const text = make(dropped ? "del" : token.kind === "bonus" ? "strong" : "span", {}, token.label);
  const sign = make("span", { class: "specnb-mark", "aria-hidden": "true" }, mark);
  return make("li", { class: `specnb-token specnb-${token.kind}`, title: meaning, "aria-label": `${token.label.trim()}: ${meaning}` }, text, sign);
}

function written(step) {
  return step.tokens.filter((t) => WRITTEN.has(t.kind)).map((t) => t.text).join("");
}

function counters(steps, index) {
  if (index === 0) return `Before the first of ${steps.length} rounds`;
  const tokens = steps[index - 1].written;
  const rate = (tokens / index).toFixed(2);
  return `Round ${index} of ${steps.length} · target passes: ${index} · tokens: ${tokens} · tokens per pass: ${rate}`;
}

function legend(steps, kinds) {
  const used = new Set(steps.flatMap((s) => s.tokens.map((t) => t.kind)));
  const items = Object.keys(kinds).filter((k) => used.has(k)).map((k) => make("li", {}, `${kinds[k][0]} ${kinds[k][1]}`));
  return make("ul", { class: "specnb-legend", "aria-label": "Legend" }, ...items);
}

function button(sign, label, action) {
  const node = make("button", { type: "button", "aria-label": label, title: label }, sign);
  node.addEventListener("click", action);
  return node;
}

function render({ model, el }) {
  const steps = model.get("steps");
  const kinds = model.get("kinds");
  const last = steps.length;
  let timer = null;

  const show = (index) => {
    model.set("index", Math.max(0, Math.min(last, index)));
    try {
      model.save_changes();
    } catch (error) {
      console.info("specnb replay: no kernel to tell", error);
    }
  };
  const step = (by) => show(model.get("index") + by);

  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.setAttribute("aria-pressed", "false");
    play.textContent = "▶ play";
  };
  const toggle = () => {
    if (timer) return stop();
    if (model.get("index") === last) show(0);
    play.setAttribute("aria-pressed", "true");
    play.textContent = "■ stop";
    timer = setInterval(() => (model.get("index") < last ? step(1) : stop()), PLAY_MS);
  };

  const text = make("p", { class: "specnb-text", role: "region", "aria-label": "Text so far" });
  const tokens = make("ol", { class: "specnb-tokens", "aria-label": "This round's tokens" });
  const count = make("p", { class: "specnb-count", role: "status", "aria-live": "polite" });
  const slider = make("input", { type: "range", min: 0, max: last, step: 1, "aria-label": "Round" });
  slider.addEventListener("input", () => show(slider.valueAsNumber));
  const first = button("|◀", "Before the first round", () => show(0));
  const back = button("◀", "Previous round", () => step(-1));
  const next = button("▶", "Next round", () => step(1));
  const end = button("▶|", "Last round", () => show(last));
  const play = button("▶ play", "Play the rounds", toggle);
  play.setAttribute("aria-pressed", "false");
  const bar = make("div", { class: "specnb-bar", role: "toolbar", "aria-label": "Step through the rounds" }, first, back, slider, next, end, play);

  const draw = () => {
    const index = model.get("index");
    const now = index ? steps[index - 1] : { tokens: [] };
    const before = steps.slice(0, Math.max(0, index - 1)).map(written).join("");
    text.replaceChildren(make("span", { class: "specnb-prompt" }, model.get("prompt")), before, make("mark", {}, written(now)));
    tokens.replaceChildren(...now.tokens.map((t) => chip(t, kinds)));
    count.textContent = counters(steps, index);
    slider.value = index;
    slider.setAttribute("aria-valuetext", counters(steps, index));
    for (const [node, off] of [[first, index === 0], [back, index === 0], [next, index === last], [end, index === last]]) {
      node.setAttribute("aria-disabled", String(off)); // not `disabled`: that would throw the focus away
    }
    text.scrollTop = text.scrollHeight;
  };

  const keys = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) step(keys[event.key]);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(last);
    else if (event.key === " " || event.key === "Enter") return event.stopPropagation(); // presses the focused button
    else return;
    event.preventDefault();
    event.stopPropagation(); // JupyterLab would move to another cell
  };

  const root = make("div", { class: "specnb-replay", role: "group", tabindex: 0, "aria-label": `Replay of ${last} rounds; arrow keys step` }, text, tokens, count, bar, legend(steps, kinds));
  root.addEventListener("keydown", press);
  el.append(root);
  model.on("change:index", draw);
  draw();
  return () => {
    stop();
    model.off("change:index", draw);
  };
}

export default { render };
