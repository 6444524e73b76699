"""The report of a run in several forms, a module for each, with a function `render`.

`terminal` is plain text, `html` one page that needs no network, `markdown` a summary for a pull request, `junit` XML
for continuous integration, and `json_file` everything, which `json_file.parse` reads back.
"""
