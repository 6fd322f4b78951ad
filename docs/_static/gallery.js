// Filters of the gallery, one for each subject that its pictures name in their classes.
// Without this script all pictures are shown.
const pictures = [...document.querySelectorAll(".plot[class*=' of-']")];
const subjectsOf = (picture) =>
  [...picture.classList].filter((name) => name.startsWith("of-"));
if (pictures.length) {
  const filters = document.createElement("div");
  filters.className = "filters";
  filters.setAttribute("role", "group");
  filters.setAttribute("aria-label", "Show pictures of");
  const sections = new Set(pictures.map((picture) => picture.closest("section")));

  const show = (subject) => {
    for (const picture of pictures)
      picture.hidden = Boolean(subject) && !picture.classList.contains(subject);
    for (const section of sections)
      section.hidden = !section.querySelector(".plot:not([hidden])");
    for (const button of filters.children)
      button.setAttribute("aria-pressed", button.value === subject);
  };

  for (const subject of ["", ...new Set(pictures.flatMap(subjectsOf))]) {
    const shown = pictures.filter(
      (picture) => !subject || picture.classList.contains(subject),
    );
    const button = document.createElement("button");
    button.type = "button";
    button.value = subject;
    button.textContent = `${subject.slice(3) || "all"} ${shown.length}`;
    button.addEventListener("click", () => show(subject));
    filters.append(button);
  }
  [...sections][0].before(filters);
  show("");
}
