"""Reports: self-contained HTML pages, and the pictures in them."""
