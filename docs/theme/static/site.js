// What the theme leaves to do, for those who read with the keyboard or a screen reader.

for (const box of document.querySelectorAll("article pre, .table-wrapper")) {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0; // so that arrow keys scroll it
}
for (const caption of document.querySelectorAll(".caption[role=heading]")) {
  caption.setAttribute("aria-level", "2");
}
