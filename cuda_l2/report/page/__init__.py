"""One HTML page that shows what results folders and archives hold: the papers' tables and figures, shape by shape."""
