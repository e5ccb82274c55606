// An image with alternative text. A new one is decoded before it replaces the old, so nothing flickers.

function render({ model, el }) {
  const img = document.createElement("img");
  const error = document.createElement("p");
  img.className = "specnb-picture";
  error.setAttribute("role", "alert");
  let shown = null;
  let newest = 0;

  const draw = async () => {
    const turn = ++newest;
    const url = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
    const next = new Image();
    next.src = url;
    await next.decode().catch(() => {});
    if (turn !== newest) return URL.revokeObjectURL(url); // a later picture came first
    img.src = url;
    if (shown) URL.revokeObjectURL(shown);
    shown = url;
  };
  const describe = () => (img.alt = model.get("alt"));
  const complain = () => {
    error.textContent = model.get("error");
    error.hidden = !error.textContent;
  };

  model.on("change:png", draw);
  model.on("change:alt", describe);
  model.on("change:error", complain);
  el.append(img, error);
  describe();
  complain();
  draw();
  return () => {
    newest += 1;
    URL.revokeObjectURL(shown);
    model.off("change:png", draw);
    model.off("change:alt", describe);
    model.off("change:error", complain);
  };
}

export default { render };
