//! DEVICE_FEATURE: migration, and the log of written pages.

use super::{Command, MAX_TRANSFER, ProtocolError, fixed, request, wire};
use crate::migration::{LogRange, MigrationState};

const COMMAND: Command = Command::DeviceFeature;
/// The smallest page of a log.
const PAGE: u64 = 4096;

/// What is asked of a feature, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureRequest {
    /// Whether it is there.
    Probe(Probe),
    /// How the device can be migrated.
    Migration,
    /// Where the device stands.
    State,
    /// The device shall go to a state.
    SetState(MigrationState),
    /// The log begins.
    StartLogging {
        /// Bytes of a page.
        page_size: u64,
    },
    /// The log ends.
    StopLogging,
    /// The log is to be told.
    Report(LogRange),
}

/// Is a feature there, with these operations?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// As sent.
    pub flags: u32,
}

/// The operations that a feature knows.
fn operations(feature: u32) -> u32 {
    match feature {
        wire::FEATURE_MIGRATION | wire::FEATURE_LOGGING_REPORT => wire::FEATURE_GET,
        wire::FEATURE_DEVICE_STATE => wire::FEATURE_GET | wire::FEATURE_SET,
        wire::FEATURE_LOGGING_START | wire::FEATURE_LOGGING_STOP => wire::FEATURE_SET,
        _ => 0,
    }
}

pub(super) fn parse(payload: &[u8]) -> Result<FeatureRequest, ProtocolError> {
    let (wire::Feature { argsz, flags }, data) = fixed::<wire::Feature>(COMMAND, payload)?;
    let head = size_of::<wire::Feature>();
    let (feature, asked) = (flags & wire::FEATURE_MASK, flags & !wire::FEATURE_MASK);
    let known = operations(feature);
    if known == 0 || asked & !(known | wire::FEATURE_PROBE) != 0 {
        return Err(ProtocolError::UnsupportedFlags { command: COMMAND, flags });
    }
    let needs = |bytes: usize| request::argument_size(COMMAND, argsz, head + bytes);
    if asked & wire::FEATURE_PROBE != 0 {
        needs(0)?;
        return Ok(FeatureRequest::Probe(Probe { flags }));
    }
    match (feature, asked) {
        (wire::FEATURE_MIGRATION, wire::FEATURE_GET) => {
            needs(size_of::<wire::MigrationFeature>())?;
            Ok(FeatureRequest::Migration)
        }
        (wire::FEATURE_DEVICE_STATE, wire::FEATURE_GET) => {
            needs(size_of::<wire::DeviceState>())?;
            Ok(FeatureRequest::State)
        }
        (wire::FEATURE_DEVICE_STATE, wire::FEATURE_SET) => {
            let (wire::DeviceState { state, .. }, _) = fixed::<wire::DeviceState>(COMMAND, data)?;
            needs(size_of::<wire::DeviceState>())?;
            let known = MigrationState::from_wire(state).filter(|state| *state != MigrationState::Error);
            known.map(FeatureRequest::SetState).ok_or(ProtocolError::MigrationState(state))
        }
        (wire::FEATURE_LOGGING_START, wire::FEATURE_SET) => parse_start(data),
        (wire::FEATURE_LOGGING_STOP, wire::FEATURE_SET) => Ok(FeatureRequest::StopLogging),
        (wire::FEATURE_LOGGING_REPORT, wire::FEATURE_GET) => {
            let range = parse_report(data)?;
            // It fits: the bitmap is one message at most.
            needs(size_of::<wire::LoggingReport>() + range.bitmap_bytes() as usize)?;
            Ok(FeatureRequest::Report(range))
        }
        _ => Err(ProtocolError::Flags { command: COMMAND, flags }),
    }
}

/// The ranges must make sense, and are not looked at any further: all of the client's memory is logged.
fn parse_start(data: &[u8]) -> Result<FeatureRequest, ProtocolError> {
    let (wire::LoggingControl { page_size, num_ranges, .. }, mut ranges) = fixed::<wire::LoggingControl>(COMMAND, data)?;
    let bad = |address, size| ProtocolError::LogRange { command: COMMAND, address, size, page_size };
    if !page_size.is_power_of_two() || page_size < PAGE {
        return Err(bad(0, 0));
    }
    for _ in 0..num_ranges {
        let (wire::LoggingRange { address, size }, rest) = fixed::<wire::LoggingRange>(COMMAND, ranges)?;
        if !request::is_range(address, size) {
            return Err(bad(address, size));
        }
        ranges = rest;
    }
    Ok(FeatureRequest::StartLogging { page_size })
}

fn parse_report(data: &[u8]) -> Result<LogRange, ProtocolError> {
    let (wire::LoggingReport { address, size, page_size }, _) = fixed::<wire::LoggingReport>(COMMAND, data)?;
    let range = LogRange { address, size, page_size };
    let whole = page_size.is_power_of_two()
        && page_size >= PAGE
        && address.is_multiple_of(page_size)
        && request::is_range(address, size)
        && range.bitmap_bytes() <= u64::from(MAX_TRANSFER);
    if whole { Ok(range) } else { Err(ProtocolError::LogRange { command: COMMAND, address, size, page_size }) }
}
