// A multiple-choice question. The answer is in the page, so feedback needs no kernel.

// Text with `backticks` as code; everything else stays text.
function inline(text) {
  return text.split("`").map((part, i) => {
    if (i % 2 === 0) return document.createTextNode(part);
    const code = document.createElement("code");
    code.textContent = part;
    return code;
  });
}

let groups = 0;

function option(model, group, place) {
  const label = document.createElement("label");
  const radio = document.createElement("input");
  radio.type = "radio";
  radio.name = group;
  radio.checked = model.get("chosen") === place;
  radio.addEventListener("change", () => {
    model.set("chosen", place);
    try {
      model.save_changes();
    } catch (error) {
      console.info("specnb quiz: no kernel to tell", error);
    }
  });
  const letter = document.createElement("span");
  letter.textContent = `${String.fromCharCode(65 + place)}.`;
  const text = document.createElement("span");
  text.append(...inline(model.get("options")[place]));
  label.append(radio, letter, text);
  return label;
}

function feedback(model) {
  const chosen = model.get("chosen");
  if (chosen < 0) return [];
  const right = chosen === model.get("answer");
  const head = document.createElement("strong");
  head.textContent = right ? "✓ Right. " : "✗ Not this one. ";
  const text = right ? model.get("why") : model.get("hints")[chosen] || "Try another.";
  return [head, ...inline(text)];
}

function render({ model, el }) {
  const box = document.createElement("fieldset");
  const legend = document.createElement("legend");
  const said = document.createElement("p");
  const group = `specnb-quiz-${(groups += 1)}`;
  box.className = "specnb-quiz";
  legend.append(...inline(model.get("question")));
  said.setAttribute("role", "status");
  said.setAttribute("aria-live", "polite");
  box.append(legend, ...model.get("options").map((_, place) => option(model, group, place)), said);
  box.addEventListener("keydown", (event) => {
    const moves = event.key.startsWith("Arrow") || event.key === " " || event.key === "Enter";
    if (moves) event.stopPropagation(); // arrows choose among the options, not among JupyterLab's cells
  });
  const draw = () => {
    said.replaceChildren(...feedback(model));
    box.querySelectorAll("input").forEach((radio, place) => (radio.checked = place === model.get("chosen")));
  };
  model.on("change:chosen", draw);
  el.append(box);
  draw();
  return () => model.off("change:chosen", draw);
}

export default { render };
