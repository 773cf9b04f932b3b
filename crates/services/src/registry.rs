//! The table of services: one line each, in the order of their names.

use crate::service::Kind;

static ALL: &[&Kind] = &[
    &crate::cache::KIND,
    &crate::concat::KIND,
    &crate::crypt::KIND,
    &crate::share::DISK,
    &crate::integrity::KIND,
    &crate::metadata::KIND,
    &crate::meter::KIND,
    &crate::migrate::KIND,
    &crate::mirror::KIND,
    &crate::parity::KIND,
    &crate::share::KIND,
    &crate::stripe::KIND,
    &crate::throttle::KIND,
];

/// All services.
pub fn all() -> &'static [&'static Kind] {
    ALL
}

/// The service of this name.
pub fn find(name: &str) -> Option<&'static Kind> {
    ALL.iter().copied().find(|kind| kind.name == name)
}
