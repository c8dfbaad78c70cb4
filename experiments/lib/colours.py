"""The colours of all pictures. The browser has them, too: no package."""

# Okabe and Ito's palette: told apart with any colour vision. Markers differ as well, for print in
# grey.
COLOURS = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
}
