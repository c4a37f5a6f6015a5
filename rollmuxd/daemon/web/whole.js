// The page works as a whole or not at all. Browsers drop what they are reading when the machine's network changes, and a
// daemon may be restarted, or be another version, meanwhile: without this, a page of which a part did not come would stay
// empty. It is loaded again a few times, ever more seldom; what is missing then is not going to come.
(() => {
  const TIMES = 5;
  const tried = Number(sessionStorage.getItem("rollmux.loads") ?? 0);
  let whole = true;
  addEventListener(
    "error",
    ({ target }) => {
      // of the window itself: a module that does not go with another one, before there is a page
      const part = target === window ? window.rollmux === undefined : target.matches?.("script, link[rel=stylesheet]");
      if (!part || !whole) return;
      whole = false;
      const link = document.getElementById("link");
      if (link) link.textContent = `a part of this page did not come${tried < TIMES ? ": loading it again" : ""}`;
      if (tried >= TIMES) return;
      sessionStorage.setItem("rollmux.loads", tried + 1);
      setTimeout(() => location.reload(), 2_000 * 2 ** tried);
    },
    true, // such an event does not bubble
  );
  addEventListener("load", () => whole && window.rollmux && sessionStorage.removeItem("rollmux.loads"));
})();
