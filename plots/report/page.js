// The page: the sortable table, explanations, copied commands, theme and print.

const views = {};
const PARTS = { surface: surfacePart, trajectory: trajectoryPart, spectra: spectraPart, layers: layersPart };
for (const node of document.querySelectorAll(".copy, #theme")) node.hidden = false;
unpack().then((able) => {
  if (able) {
    for (const node of document.querySelectorAll(".live")) node.hidden = false;
    for (const picture of document.querySelectorAll("details.picture[data-live]")) picture.open = false;
    networkFilter(document.getElementById("networks"));
    for (const [name, part] of Object.entries(PARTS)) {
      const host = document.getElementById(`${name}-view`);
      if (host) views[name] = part(host);
    }
  }
  roving(document.querySelector("nav ol"), "a");
  roving(document.getElementById("figures"), "summary");
  for (const name in views) roving(document.getElementById(`${name}-view`), ".save > summary");
  for (const { tHead } of document.querySelectorAll("table.sortable")) roving(tHead, "a, button");
  document.getElementById("networks").hidden = view.names.length < 2;
  settled();
  recalled();
  document.documentElement.dataset.ready = "true";
});

for (const table of document.querySelectorAll("table.sortable")) {
  table.parentNode.before(tableControls(table, table.parentNode.getAttribute("aria-label").replace("Table of ", "")));
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const title = head.querySelector(".title") || head.firstChild;
    const button = make("button", { type: "button", class: "sort", onclick: () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => (row.cells[column].dataset.value != null ? +row.cells[column].dataset.value : row.cells[column].textContent);
      const order = (a, b) => (a === "") - (b === "") || (up ? 1 : -1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
      body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
    } }, title.textContent);
    title.replaceWith(button);
  });
}

const dialog = document.getElementById("dialog");
document.addEventListener("click", (event) => {
  const info = event.target.closest("a.info"), copy = event.target.closest("button.copy");
  if (info) {
    event.preventDefault();
    const { about, title, definition, meaning } = info.dataset;
    const words = document.getElementById(`meaning-${meaning}`) || document.querySelector(`#probe-${CSS.escape(about)} figcaption`);
    const copied = [words, document.getElementById(`about-${about}`)].filter(Boolean).flatMap((node) => [...node.cloneNode(true).childNodes]);
    const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
    dialog.replaceChildren(make("h2", {}, title || about), ...(definition ? [make("p", {}, `${definition}.`)] : []), ...copied, close);
    for (const link of dialog.querySelectorAll("a[href^='#protocol-']")) link.after(`: ${document.querySelector(link.hash).childNodes[1].textContent}`);
    dialog.showModal();
  } else if (copy) {
    const code = copy.parentNode.querySelector("code"), done = () => { copy.textContent = "Copied"; };
    const select = () => { getSelection().selectAllChildren(code); document.execCommand("copy"); done(); };
    navigator.clipboard ? navigator.clipboard.writeText(code.textContent).then(done, select) : select();
  } else if (event.target === dialog) dialog.close();
});

const theme = document.getElementById("theme");
const label = () => { theme.textContent = dark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  label();
  redrawAll();
});
label();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); redrawAll(); });
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const node of closed) node.open = true;
  redrawAll();
});
addEventListener("afterprint", () => { for (const node of closed) node.open = false; });
