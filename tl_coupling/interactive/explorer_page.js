// Draws each map of a page from the numbers that stand in it.
for (const root of document.querySelectorAll(".tlc-explorer:not([data-drawn])")) exploreCoupling(root, JSON.parse(root.dataset.map));
