"""Tables and figures of papers: their files, their runs and their results.

A table is a YAML file, ``recipes/PAPER/tables/NAME.yaml`` (:class:`~stateline.papers.table.Table`).
``stateline reproduce PAPER/NAME`` trains its rows and writes a
:class:`~stateline.papers.record.TableRecord`.
"""
