"""A run of the conformance kit in the forms that people and machines read: one module a form, each with `render`.

`terminal` is plain text, `html` one page that needs no network, `markdown` what a pull request shows, `junit` the XML
that continuous integration reads, `json_file` all there is, which `json_file.parse` reads again.
"""
