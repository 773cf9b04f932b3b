//! The disk against a fake front end and driver.

mod bad;
mod migration;
mod requests;
mod restarts;
mod rust_vmm;
mod sessions;
