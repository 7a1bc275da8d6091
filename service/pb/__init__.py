"""Code generated from `protos/`, committed; `python -m service.pb.generate` renews it, `--check` proves it current."""
