"""Charts: drawn by Vega-Lite in a page, and as PNG, SVG, CSV and JSON from the same objects."""
