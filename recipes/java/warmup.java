// Each kind of code once, as a child will write it: the compiler's own code is compiled by that.
int total = 0;
for (int each : List.of(1, 2, 3)) {
    total += each;
}
record Point(int x, int y) {
    double length() {
        return Math.hypot(x, y);
    }
}
class Warm<T> implements Supplier<T> {
    private final T value;

    Warm(T value) {
        this.value = value;
    }

    public T get() {
        return value;
    }
}
int twice(int number) {
    return 2 * number;
}
new Warm<>(new Point(3, 4)).get().length();
String.format("%d %.2f", twice(total), 1.5);
IntStream.range(0, 9).boxed().collect(Collectors.groupingBy(each -> each % 3, TreeMap::new, Collectors.counting()));
Stream.of("a", "b").map(String::toUpperCase).collect(Collectors.joining(","));
try {
    throw new IllegalStateException("warm");
} catch (IllegalStateException error) {
    System.out.println(error.getMessage());
}
new BigDecimal("1.10").multiply(BigDecimal.TEN);
UUID.randomUUID().toString() + Math.random();
