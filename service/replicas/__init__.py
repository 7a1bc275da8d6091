"""`--data-parallel N`: engines in processes of their own, each with its copy of the model, behind one server."""
