//! Admin commands through a fake guest.
