//! Migration: the device's state as a client sees it, and the log of written pages.

use zerocopy::IntoBytes;

use super::{Connection, dispatch::Refusal};
use crate::codec::{Command, FeatureRequest, Header, Probe, ProtocolError, wire};
use crate::device::Device;
use crate::migration::{LogRange, Migration};

/// The device's migration, if it has any.
pub(super) fn migration(device: &mut dyn Device, command: Command) -> Result<&mut dyn Migration, ProtocolError> {
    device.migration().ok_or(ProtocolError::Unsupported(command))
}

/// Head of an answer with `bytes` of data.
fn head(flags: u32, bytes: usize) -> wire::Feature {
    wire::Feature { argsz: (size_of::<wire::Feature>() + bytes) as u32, flags }
}

impl Connection {
    pub(super) fn feature(
        &mut self,
        header: &Header,
        request: FeatureRequest,
        device: &mut dyn Device,
    ) -> Result<(), Refusal> {
        let migration = migration(device, Command::DeviceFeature)?;
        match request {
            FeatureRequest::Probe(Probe { flags }) => Ok(self.reply(header, [head(flags, 0).as_bytes(), &[]], &[])?),
            FeatureRequest::Migration => {
                let data = wire::MigrationFeature { flags: wire::MIGRATION_STOP_COPY | wire::MIGRATION_PRE_COPY };
                let head = head(wire::FEATURE_MIGRATION | wire::FEATURE_GET, data.as_bytes().len());
                Ok(self.reply(header, [head.as_bytes(), data.as_bytes()], &[])?)
            }
            FeatureRequest::State => {
                let data = wire::DeviceState { state: migration.state() as u32, data_fd: 0 };
                let head = head(wire::FEATURE_DEVICE_STATE | wire::FEATURE_GET, data.as_bytes().len());
                Ok(self.reply(header, [head.as_bytes(), data.as_bytes()], &[])?)
            }
            FeatureRequest::SetState(state) => {
                let outcome = migration.set_state(state);
                let data = wire::DeviceState { state: state as u32, data_fd: 0 };
                let head = head(wire::FEATURE_DEVICE_STATE | wire::FEATURE_SET, data.as_bytes().len());
                self.finish(header, outcome, &[head.as_bytes(), data.as_bytes()].concat())
            }
            FeatureRequest::StartLogging { page_size } => {
                migration.start_logging(page_size)?;
                let data = wire::LoggingControl { page_size, num_ranges: 0, reserved: 0 };
                let head = head(wire::FEATURE_LOGGING_START | wire::FEATURE_SET, data.as_bytes().len());
                Ok(self.reply(header, [head.as_bytes(), data.as_bytes()], &[])?)
            }
            FeatureRequest::StopLogging => {
                migration.stop_logging();
                let head = head(wire::FEATURE_LOGGING_STOP | wire::FEATURE_SET, 0);
                Ok(self.reply(header, [head.as_bytes(), &[]], &[])?)
            }
            FeatureRequest::Report(range) => {
                let mut bitmap = vec![0; range.bitmap_bytes() as usize];
                migration.report(range, &mut bitmap)?;
                let LogRange { address, size, page_size } = range;
                let data = wire::LoggingReport { address, size, page_size };
                let head = head(wire::FEATURE_LOGGING_REPORT | wire::FEATURE_GET, data.as_bytes().len() + bitmap.len());
                let fixed = [head.as_bytes(), data.as_bytes()].concat();
                Ok(self.reply(header, [&fixed, &bitmap], &[])?)
            }
        }
    }

    pub(super) fn migration_read(&mut self, header: &Header, size: u32, device: &mut dyn Device) -> Result<(), Refusal> {
        let data = migration(device, Command::MigDataRead)?.read(size as usize)?;
        assert!(data.len() <= size as usize, "no more than was asked for");
        let head =
            wire::MigrationData { argsz: (size_of::<wire::MigrationData>() + data.len()) as u32, size: data.len() as u32 };
        Ok(self.reply(header, [head.as_bytes(), &data], &[])?)
    }
}
