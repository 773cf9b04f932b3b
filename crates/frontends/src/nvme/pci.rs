//! PCI configuration space.
