//! The table of services: one line each.

use crate::{
    cache, concat, crypt, integrity, metadata, meter, migrate, mirror, parity, service::Kind, share, stripe, throttle,
};

static ALL: &[&Kind] = &[
    &cache::KIND,
    &concat::KIND,
    &crypt::KIND,
    &share::DISK,
    &integrity::KIND,
    &metadata::KIND,
    &meter::KIND,
    &migrate::KIND,
    &mirror::KIND,
    &parity::KIND,
    &share::KIND,
    &stripe::KIND,
    &throttle::KIND,
];

/// All services.
pub fn all() -> &'static [&'static Kind] {
    ALL
}

/// The service of this name.
pub fn find(name: &str) -> Option<&'static Kind> {
    ALL.iter().copied().find(|kind| kind.name == name)
}
