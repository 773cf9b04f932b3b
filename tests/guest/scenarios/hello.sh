# shellcheck shell=sh
# Nothing but a sign of life; the accelerator's probe uses it.
say "Linux $(uname -r), $(nproc) processors"
