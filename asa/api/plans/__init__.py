"""The plan of a program: ``asa.plan``, and the plan on which all ranks of a program agree."""
