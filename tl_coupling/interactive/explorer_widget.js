// Draws the map of a notebook's widget, whose k, pair and run are those of Python.
export default {
  render({model, el}) {
    const root = document.createElement("div");
    root.className = "tlc-explorer";
    const view = document.createElement("div");
    view.className = "tlc-view";
    view.append(root);
    el.append(view);
    const map = model.get("numbers");
    const explorer = exploreCoupling(root, map, ({k, pair, run}) => {
      model.set({k, pair: [map.row_keys[pair[0]], map.col_keys[pair[1]]], run});
      model.save_changes();
    });
    const follow = () => {
      const [row, col] = model.get("pair");
      explorer.choose({k: model.get("k"), pair: [map.row_keys.indexOf(row), map.col_keys.indexOf(col)], run: model.get("run")});
    };
    for (const name of ["k", "pair", "run"]) model.on(`change:${name}`, follow);
    model.on("change:directions", () => explorer.tell(model.get("directions")));
    follow();
  }
};
