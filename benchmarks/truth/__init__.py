"""Known problems and known measurements of others, which the project's own planning is held against.

``pipedream`` and ``piper`` read the profiles published with those planners and solve the published problem exactly;
``vtrain`` fits a model of iteration time to published measurements. Each works on the public file as it is: units and
assumptions are the file's, not those of :mod:`asa.cost`.
"""
