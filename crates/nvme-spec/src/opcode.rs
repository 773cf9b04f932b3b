//! Opcodes (Base 5, Base 7, NVM 3.3).

wire_values! {
    /// Opcodes of the admin queue (Base 5; opcodes for Admin commands).
    AdminOpcode(u8) {
        DELETE_IO_SQ = 0x00, "Delete I/O Submission Queue";
        CREATE_IO_SQ = 0x01, "Create I/O Submission Queue";
        GET_LOG_PAGE = 0x02, "Get Log Page";
        DELETE_IO_CQ = 0x04, "Delete I/O Completion Queue";
        CREATE_IO_CQ = 0x05, "Create I/O Completion Queue";
        IDENTIFY = 0x06, "Identify";
        ABORT = 0x08, "Abort";
        SET_FEATURES = 0x09, "Set Features";
        GET_FEATURES = 0x0a, "Get Features";
        ASYNC_EVENT_REQUEST = 0x0c, "Asynchronous Event Request";
        NAMESPACE_MANAGEMENT = 0x0d, "Namespace Management";
        FIRMWARE_COMMIT = 0x10, "Firmware Commit";
        FIRMWARE_IMAGE_DOWNLOAD = 0x11, "Firmware Image Download";
        DEVICE_SELF_TEST = 0x14, "Device Self-test";
        NAMESPACE_ATTACHMENT = 0x15, "Namespace Attachment";
        KEEP_ALIVE = 0x18, "Keep Alive";
        DIRECTIVE_SEND = 0x19, "Directive Send";
        DIRECTIVE_RECEIVE = 0x1a, "Directive Receive";
        VIRTUALIZATION_MANAGEMENT = 0x1c, "Virtualization Management";
        NVME_MI_SEND = 0x1d, "NVMe-MI Send";
        NVME_MI_RECEIVE = 0x1e, "NVMe-MI Receive";
        CAPACITY_MANAGEMENT = 0x20, "Capacity Management";
        LOCKDOWN = 0x24, "Lockdown";
        MIGRATION_SEND = 0x41, "Migration Send";
        MIGRATION_RECEIVE = 0x42, "Migration Receive";
        CONTROLLER_DATA_QUEUE = 0x45, "Controller Data Queue";
        DOORBELL_BUFFER_CONFIG = 0x7c, "Doorbell Buffer Config";
        FABRICS = 0x7f, "Fabrics Commands";
        FORMAT_NVM = 0x80, "Format NVM";
        SECURITY_SEND = 0x81, "Security Send";
        SECURITY_RECEIVE = 0x82, "Security Receive";
        SANITIZE = 0x84, "Sanitize";
        GET_LBA_STATUS = 0x86, "Get LBA Status";
    }
}

wire_values! {
    /// Opcodes of I/O queues: those common to all command sets (Base 7) and the NVM command set's (NVM 3.3).
    NvmOpcode(u8) {
        FLUSH = 0x00, "Flush";
        WRITE = 0x01, "Write";
        READ = 0x02, "Read";
        WRITE_UNCORRECTABLE = 0x04, "Write Uncorrectable";
        COMPARE = 0x05, "Compare";
        WRITE_ZEROES = 0x08, "Write Zeroes";
        DATASET_MANAGEMENT = 0x09, "Dataset Management";
        VERIFY = 0x0c, "Verify";
        RESERVATION_REGISTER = 0x0d, "Reservation Register";
        RESERVATION_REPORT = 0x0e, "Reservation Report";
        RESERVATION_ACQUIRE = 0x11, "Reservation Acquire";
        IO_MANAGEMENT_RECEIVE = 0x12, "I/O Management Receive";
        RESERVATION_RELEASE = 0x15, "Reservation Release";
        CANCEL = 0x18, "Cancel";
        COPY = 0x19, "Copy";
        IO_MANAGEMENT_SEND = 0x1d, "I/O Management Send";
    }
}

wire_values! {
    /// Data Transfer, the low two bits of most opcodes (Base 4.1.1); a few commands do not follow it.
    DataTransfer(u8) {
        NONE = 0, "No data transfer";
        HOST_TO_CONTROLLER = 1, "Host to controller transfers";
        CONTROLLER_TO_HOST = 2, "Controller to host transfers";
        BIDIRECTIONAL = 3, "Bidirectional transfers";
    }
}

impl AdminOpcode {
    /// First of the vendor specific opcodes, C0h to FFh.
    pub const VENDOR_FIRST: Self = Self(0xc0);
    /// Ours: opens a space of FastPath in the place of I/O queue pair 1. PRP1: the ring of records, 512 bytes at a multiple of 512;
    /// Command Dword 10: pages of 4 KiB of the buffer, which begins at address 0 (docs/hardware.md, "FastPath").
    pub const OPEN_SPACE: Self = Self(0xc1);

    /// The direction the opcode's low bits state.
    #[must_use]
    pub const fn data_transfer(self) -> DataTransfer {
        DataTransfer(self.0 & 3)
    }
}

impl NvmOpcode {
    /// First of the vendor specific opcodes, 80h to FFh.
    pub const VENDOR_FIRST: Self = Self(0x80);

    /// The direction the opcode's low bits state.
    #[must_use]
    pub const fn data_transfer(self) -> DataTransfer {
        DataTransfer(self.0 & 3)
    }
}
