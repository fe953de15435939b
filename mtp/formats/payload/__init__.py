"""The two files that an export for transformers' `custom_generate` carries with it; they need nothing of `mtp`."""
