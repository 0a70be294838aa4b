//! What readers say of the device.

use super::*;

#[test]
fn bytes_whose_end_nobody_saw_are_not_measured_and_waited_ones_are() {
    let f = Fixture::new(4 << 20);
    for kind in kinds() {
        let arena = arena(8 << 20);
        let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
        let [ahead, wanted] =
            requests(&[(0, 1 << 16, ReadClass::Prefetch), (1 << 20, 1 << 18, ReadClass::Demand)])
                .try_into()
                .unwrap();
        reader.submit(ahead).unwrap();
        reader.kick();
        // Long over when anybody looks again.
        std::thread::sleep(Duration::from_millis(200));
        reader.submit(wanted).unwrap();
        reader.kick();
        assert_eq!(reader.outstanding(), 2);
        assert_eq!(drain(&mut *reader).len(), 2);
        let measured = match reader.name() {
            // Its threads see every read end.
            "pread" => ahead.len + wanted.len,
            _ => wanted.len,
        };
        assert_eq!(reader.busy().bytes, measured as u64, "{}", reader.name());
        assert!(reader.busy().bandwidth().is_some());
    }
}
