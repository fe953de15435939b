"""Two files that an export for transformers' `custom_generate` carries with it; of `mtp` they need `fingerprint.py`,
which goes along."""
