// Before anything is drawn, so that nobody is blinded: "light", "dark", or as the system says.
(() => {
  const kept = localStorage.getItem("rollmux.theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
