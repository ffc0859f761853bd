"""Reports: self-contained HTML pages (`page`), and the plots (`figures`) and pictures (`images`) in them."""
