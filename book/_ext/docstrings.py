"""Docstrings use |s| for a size and * for a star; reStructuredText would read both as markup."""


def escape(app, what, name, obj, options, lines):
    for i, line in enumerate(lines):
        pieces = line.split("``")  # every second piece is literal
        pieces[::2] = [p.replace("|", "\\|").replace("*", "\\*") for p in pieces[::2]]
        lines[i] = "``".join(pieces)


def setup(app):
    app.connect("autodoc-process-docstring", escape, priority=100)
    return {"parallel_read_safe": True}
