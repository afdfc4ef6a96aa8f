"""Front door for a clone: the workflow itself is workflow/Snakefile."""


include: "workflow/Snakefile"


# An included file cannot name the default target of the file that includes it.
workflow.default_target = "all"
