//! Migration, as a machine monitor asks for it.

use zerocopy::{FromBytes, IntoBytes};

use super::{Client, ClientError, fixed};
use crate::codec::{Command, wire};
use crate::migration::{LogRange, MigrationState};

impl Client {
    /// How the device can be migrated (`wire::MIGRATION_*`); refused by one that cannot.
    pub fn migration_flags(&mut self) -> Result<u64, ClientError> {
        let feature = wire::FEATURE_MIGRATION | wire::FEATURE_GET;
        let reply = self.feature::<wire::MigrationFeature>(feature, &[], size_of::<wire::MigrationFeature>())?;
        Ok(reply.0.flags)
    }

    /// Whether the device knows a feature, and the operations of it (`wire::FEATURE_*`, or'ed together).
    pub fn probe_feature(&mut self, flags: u32) -> Result<(), ClientError> {
        let argsz = size_of::<wire::Feature>() as u32;
        let ask = wire::Feature { argsz, flags: flags | wire::FEATURE_PROBE };
        self.call(Command::DeviceFeature, [ask.as_bytes(), &[]], &[])?;
        Ok(())
    }

    /// Where the device stands.
    pub fn migration_state(&mut self) -> Result<MigrationState, ClientError> {
        let feature = wire::FEATURE_DEVICE_STATE | wire::FEATURE_GET;
        let reply = self.feature::<wire::DeviceState>(feature, &[], size_of::<wire::DeviceState>())?;
        let detail = "an unknown migration state";
        MigrationState::from_wire(reply.0.state).ok_or(ClientError::BadReply { command: Command::DeviceFeature, detail })
    }

    /// Has the device go to a state.
    pub fn set_migration_state(&mut self, state: MigrationState) -> Result<(), ClientError> {
        let data = wire::DeviceState { state: state as u32, data_fd: 0 };
        let feature = wire::FEATURE_DEVICE_STATE | wire::FEATURE_SET;
        self.feature::<wire::DeviceState>(feature, data.as_bytes(), size_of_val(&data)).map(|_| ())
    }

    /// MIG_DATA_READ: the next part of the device's state, at most `most` bytes; none at the end.
    pub fn migration_read(&mut self, most: usize) -> Result<Vec<u8>, ClientError> {
        let command = Command::MigDataRead;
        let size = self.transfer_size(command, most)?;
        let head = wire::MigrationData { argsz: size + size_of::<wire::MigrationData>() as u32, size };
        let reply = self.call(command, [head.as_bytes(), &[]], &[])?;
        match wire::MigrationData::read_from_prefix(&reply.payload) {
            Ok((head, data)) if head.size as usize == data.len() && head.size <= size => Ok(data.to_vec()),
            _ => Err(ClientError::BadReply { command, detail: "not as many bytes as it says, or more than were asked for" }),
        }
    }

    /// MIG_DATA_WRITE: the next part of a state that the device is to take.
    pub fn migration_write(&mut self, data: &[u8]) -> Result<(), ClientError> {
        let command = Command::MigDataWrite;
        let size = self.transfer_size(command, data.len())?;
        let head = wire::MigrationData { argsz: size + size_of::<wire::MigrationData>() as u32, size };
        self.call(command, [head.as_bytes(), data], &[])?;
        Ok(())
    }

    /// Has the device remember which pages it writes; no ranges: all.
    pub fn start_logging(&mut self, page_size: u64, ranges: &[(u64, u64)]) -> Result<(), ClientError> {
        let head = wire::LoggingControl { page_size, num_ranges: ranges.len() as u32, reserved: 0 };
        let mut data = head.as_bytes().to_vec();
        for &(address, size) in ranges {
            data.extend_from_slice(wire::LoggingRange { address, size }.as_bytes());
        }
        let feature = wire::FEATURE_LOGGING_START | wire::FEATURE_SET;
        self.feature::<wire::LoggingControl>(feature, &data, data.len()).map(|_| ())
    }

    /// Ends that.
    pub fn stop_logging(&mut self) -> Result<(), ClientError> {
        let ask = wire::Feature {
            argsz: size_of::<wire::Feature>() as u32,
            flags: wire::FEATURE_LOGGING_STOP | wire::FEATURE_SET,
        };
        self.call(Command::DeviceFeature, [ask.as_bytes(), &[]], &[])?;
        Ok(())
    }

    /// Which pages were written since the last report: bit `n` of byte `n / 8` is the range's page `n`.
    pub fn written_pages(&mut self, range: LogRange) -> Result<Vec<u8>, ClientError> {
        let LogRange { address, size, page_size } = range;
        let ask = wire::LoggingReport { address, size, page_size };
        let bytes = range.bitmap_bytes() as usize;
        let feature = wire::FEATURE_LOGGING_REPORT | wire::FEATURE_GET;
        let (_, bitmap) = self.feature::<wire::LoggingReport>(feature, ask.as_bytes(), size_of_val(&ask) + bytes)?;
        if bitmap.len() != bytes {
            return Err(ClientError::BadReply { command: Command::DeviceFeature, detail: "a bitmap of another size" });
        }
        Ok(bitmap)
    }

    /// One DEVICE_FEATURE; what the answer has for it, and what follows that.
    fn feature<T: FromBytes>(&mut self, flags: u32, data: &[u8], answer: usize) -> Result<(T, Vec<u8>), ClientError> {
        let argsz = size_of::<wire::Feature>() + data.len().max(answer);
        let ask = wire::Feature { argsz: argsz as u32, flags };
        let reply = self.call(Command::DeviceFeature, [ask.as_bytes(), data], &[])?;
        fixed::<wire::Feature>(Command::DeviceFeature, &reply)?;
        let rest = reply.payload.get(size_of::<wire::Feature>()..).unwrap_or_default();
        match T::read_from_prefix(rest) {
            Ok((value, more)) => Ok((value, more.to_vec())),
            Err(_) => Err(ClientError::BadReply { command: Command::DeviceFeature, detail: "it is too short" }),
        }
    }
}
