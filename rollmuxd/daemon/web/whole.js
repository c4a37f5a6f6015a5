// The page works as a whole or not at all. Browsers drop what they are reading when the machine's network changes, and a
// daemon may be restarted meanwhile: without this, a page of which a part did not come would stay empty for ever.
addEventListener(
  "error",
  ({ target }) => {
    if (!target.matches?.("script, link[rel=stylesheet]")) return;
    const link = document.getElementById("link");
    if (link) link.textContent = "a part of this page did not come: loading it again";
    setTimeout(() => location.reload(), 2_000);
  },
  true, // such an event does not bubble
);
