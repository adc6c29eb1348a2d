"""The site: ``tools/docs/build`` makes it of docs/, ``python -m tools.docs.notebooks`` runs the notebooks anew."""
