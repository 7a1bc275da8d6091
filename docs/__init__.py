"""The documents: plain Markdown by purpose, what makes their tables (`generate`), and what makes a site (`conf`)."""
