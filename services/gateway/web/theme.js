// Set the colours before the page is drawn: the system's, or those of the switch. A classic script in the head.

(() => {
  const STORED = "orcinus-theme"; // light or dark; absent means the system's
  const NAMES = { "": "as the system", light: "light", dark: "dark" };
  const root = document.documentElement;

  function set(theme) {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    const button = document.getElementById("theme");
    if (button) button.title = `Colours: ${NAMES[theme]}`;
    button?.setAttribute("aria-label", button.title);
  }

  function next() {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const other = isDark ? "light" : "dark";
    const isSystem = matchMedia("(prefers-color-scheme: dark)").matches === (other === "dark");
    const theme = isSystem ? "" : other;
    if (theme) localStorage.setItem(STORED, theme);
    else localStorage.removeItem(STORED);
    set(theme);
  }

  const stored = localStorage.getItem(STORED);
  const theme = stored === "light" || stored === "dark" ? stored : "";
  set(theme);
  addEventListener("DOMContentLoaded", () => {
    set(theme);
    document.getElementById("theme").addEventListener("click", next);
  });
})();
