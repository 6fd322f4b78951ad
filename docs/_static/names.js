// Long names of signatures break after an underscore, or where a capital begins a word.
// Without this script they break anywhere.
for (const name of document.querySelectorAll("dt.sig .sig-name .pre, dt.sig .sig-param > .n:first-child .pre")) {
  const parts = name.textContent.split(/(?<=_)|(?<=[a-z])(?=[A-Z])/);
  name.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
}
