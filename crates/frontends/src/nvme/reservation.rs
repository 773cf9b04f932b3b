//! Reservations (Base 8.1.22): who may read and write a shared namespace. A pure state machine.

/// Registrants, holder and type of one namespace's reservation.
#[derive(Debug, Default)]
pub(crate) struct Reservations {}
